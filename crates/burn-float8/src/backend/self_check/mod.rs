//! The first time that a process uses a kernel with some compile-time parameters on a device, its result is compared with the scalar
//! reference. What is wrong is struck off, and the call computed again on the next path.
//!
//! ```text
//! launch ─ all kernels known to be right ─▶ result
//!    │ a new one
//!    ▼
//! compare ─ right ─▶ result                   cast   sampled rows, bit for bit, scales and amax included
//!    │ wrong                                  GEMM   sampled elements against f64 dot products of the decoded codes
//!    ▼                                        fused  sampled rows against Burn's operations
//! strike off, log, launch the next path       the host where none is left; of fused operations Burn's
//! ```
mod cast;
mod fused;
mod gemm;
mod read;

use std::collections::{HashMap, HashSet};
use std::env::VarError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Instant;

use burn_backend::DeviceId;
pub(super) use cast::quantize;
use cubecl::client::ComputeClient;
use cubecl::future::block_on;
use cubecl::prelude::Runtime;
use float8_kernels::{Granularity, KernelVariant, device_key, launched_by};
pub(super) use fused::fused;
pub(super) use gemm::{Product, multiply};
use parking_lot::{Mutex, RwLock};

use super::{SelfCheckReport, lost};
use crate::config::SelfCheck;
use crate::error::{Float8Error, SelfCheckFailure};

/// The self-checks of one device, whatever backends are on it.
pub(super) struct DeviceChecks {
    /// Whether a configuration or the environment says that nothing is to be checked.
    off: AtomicBool,
    /// Whether the device is a CPU, on which nothing is checked.
    is_cpu: bool,
    /// Held during a check: another thread that comes to a new kernel meanwhile waits, and learns what was found.
    turn: Mutex<()>,
    found: RwLock<Found>,
    prepared: OnceLock<Result<(), Float8Error>>,
}

#[derive(Default)]
struct Found {
    right: HashSet<KernelVariant>,
    wrong: HashSet<KernelVariant>,
    failures: Vec<SelfCheckFailure>,
    seconds: f64,
}

/// How many calls were wrong, on any device.
static FAILURES: AtomicU64 = AtomicU64::new(0);

/// Whether nothing was wrong and nothing was lost, on any device: all that a call of a device that works asks.
pub(super) fn is_faultless() -> bool {
    FAILURES.load(Ordering::Acquire) == 0 && lost::is_nothing()
}

/// The checks of a client's device: one value for all clients of the device.
pub(super) fn of<R: Runtime>(client: &ComputeClient<R>) -> Arc<DeviceChecks> {
    static DEVICES: LazyLock<RwLock<HashMap<usize, Arc<DeviceChecks>>>> = LazyLock::new(RwLock::default);
    let key = device_key(client);
    if let Some(known) = DEVICES.read().get(&key) {
        return known.clone();
    }
    let new = || {
        lost::watch();
        Arc::new(DeviceChecks {
            off: AtomicBool::new(variable() == Ok(Some(SelfCheck::Off))),
            is_cpu: client.properties().hardware.num_cpu_cores.is_some(),
            turn: Mutex::default(),
            found: RwLock::default(),
            prepared: OnceLock::new(),
        })
    };
    DEVICES.write().entry(key).or_insert_with(new).clone()
}

/// What `FLOAT8_SELF_CHECK` says, if it is set.
fn variable() -> Result<Option<SelfCheck>, Float8Error> {
    const NAME: &str = "FLOAT8_SELF_CHECK";
    let wrong = |value: &str| Float8Error::config(NAME, format!("{value:?}"), "expected first_use or off");
    match std::env::var(NAME) {
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(value)) => Err(wrong(&value.to_string_lossy())),
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) if value == "first_use" => Ok(Some(SelfCheck::FirstUse)),
        Ok(value) if value == "off" => Ok(Some(SelfCheck::Off)),
        Ok(value) => Err(wrong(&value)),
    }
}

impl DeviceChecks {
    /// Checks from here on, or not, as a configuration says, unless the environment says otherwise.
    pub(super) fn set(&self, asked_for: Option<SelfCheck>) -> Result<(), Float8Error> {
        let variable = variable()?;
        if let Some(choice) = variable.or(asked_for) {
            self.off.store(choice == SelfCheck::Off, Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_off(&self) -> bool {
        self.is_cpu || self.off.load(Ordering::Relaxed)
    }

    /// What `prepare` gives, which runs once, and not where nothing is checked.
    pub(super) fn prepared(&self, prepare: impl FnOnce() -> Result<(), Float8Error>) -> Result<(), Float8Error> {
        if self.is_off() { Ok(()) } else { self.prepared.get_or_init(prepare).clone() }
    }

    pub(super) fn report(&self, device: DeviceId) -> SelfCheckReport {
        let Found { right, failures, seconds, .. } = &*self.found.read();
        let (kernels, seconds, failures) = (right.len(), *seconds, failures.clone());
        SelfCheckReport { kernels, seconds, failures, off: self.is_off(), lost: lost::first(device) }
    }

    /// The first call that was wrong, or the first task that the device has lost.
    pub(super) fn fault(&self, device: DeviceId) -> Option<Float8Error> {
        if let Some(message) = lost::first(device) {
            return Some(Float8Error::Lost { message });
        }
        self.found.read().failures.first().cloned().map(Float8Error::SelfCheck)
    }

    /// Whether the result of a call is right. `compare` is asked only if the call has launched a kernel for the first time.
    ///
    /// An error of the device may belong to an earlier launch. So the call is made again before it is blamed; if it is right then, the
    /// error is noted as a loss of the device.
    fn judge<R: Runtime>(
        &self,
        (client, device): (&ComputeClient<R>, DeviceId),
        Call { launched, lost_before, retried }: &mut Call,
        (granularities, call_and_path): (Option<[Granularity; 2]>, impl FnOnce() -> [String; 2]),
        compare: impl FnOnce() -> Result<(), Mismatch>,
    ) -> Verdict {
        if let Some(known) = self.found.read().known(launched) {
            return known;
        }
        let _turn = self.turn.lock();
        if let Some(known) = self.found.read().known(launched) {
            return known;
        }
        // What the device takes to compile and to compute is no part of what checks cost.
        let done = block_on(client.sync());
        let start = Instant::now();
        let compared = match done {
            Ok(()) => compare(),
            Err(error) if retried.is_none() => {
                *retried = Some(error.to_string());
                return Verdict::Again;
            }
            Err(error) => Err(Mismatch::Wrong(error.to_string())),
        };
        let mut found = self.found.write();
        found.seconds += start.elapsed().as_secs_f64();
        let mismatch = match compared {
            Ok(()) => {
                found.right.extend(&*launched);
                if let Some(error) = retried.take() {
                    lost::reported(device, error);
                }
                return Verdict::Right;
            }
            Err(Mismatch::Unread(error)) => {
                log::warn!("Float8: a kernel could not be checked, as its result could not be read: {error}");
                return Verdict::Right;
            }
            Err(Mismatch::Wrong(mismatch)) => mismatch,
        };
        let mut new: Vec<_> = launched.iter().filter(|kernel| !found.right.contains(kernel)).copied().collect();
        new.sort_unstable();
        new.dedup();
        let [call, path] = call_and_path();
        // What this call has lost is made up for, and its error explained.
        *retried = None;
        let reasons = [mismatch].into_iter().chain(lost::take_after(device, *lost_before)).collect::<Vec<_>>();
        let kernels = new.iter().map(|kernel| kernel.name.into()).collect();
        found.wrong.extend(new);
        found.fail(SelfCheckFailure { kernels, call, path, granularities, found: reasons.join("; ") });
        Verdict::Wrong
    }

    /// A path is struck off for a kernel that another call has found to be wrong, unless that is known.
    fn strike_for_another(
        &self,
        granularities: [Granularity; 2],
        launched: &[KernelVariant],
        [call, path]: [String; 2],
    ) {
        let mut found = self.found.write();
        if found.failures.iter().any(|failure| failure.granularities == Some(granularities) && failure.path == path) {
            return;
        }
        let kernels = launched.iter().filter(|k| found.wrong.contains(k)).map(|kernel| kernel.name.into()).collect();
        let reason = "it shares a kernel with one that was wrong".into();
        found.fail(SelfCheckFailure { kernels, call, path, granularities: Some(granularities), found: reason });
    }
}

impl Found {
    /// What is known of all of these, or of one that is wrong.
    fn known(&self, launched: &[KernelVariant]) -> Option<Verdict> {
        if launched.iter().any(|kernel| self.wrong.contains(kernel)) {
            return Some(Verdict::Wrong);
        }
        launched.iter().all(|kernel| self.right.contains(kernel)).then_some(Verdict::Right)
    }

    fn fail(&mut self, failure: SelfCheckFailure) {
        log::error!("Float8: {failure}; this is not used again");
        self.failures.push(failure);
        FAILURES.fetch_add(1, Ordering::AcqRel);
    }
}

/// What came of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    /// It is to be made again, in the same way.
    Again,
    /// It is to be made again in another way.
    Wrong,
}

/// Why a result is not known to be right.
pub(super) enum Mismatch {
    /// It is not what it should be.
    Wrong(String),
    /// It could not be read.
    Unread(String),
}

/// A call under way.
struct Call {
    launched: Vec<KernelVariant>,
    /// How much its device had lost before.
    lost_before: usize,
    /// The error of the device at which it was made again.
    retried: Option<String>,
}

impl Call {
    fn new() -> Self {
        Self { launched: vec![], lost_before: 0, retried: None }
    }

    /// What `launch` gives; the kernels that it launches are noted, none where nothing is checked.
    fn record<T>(&mut self, checks: &DeviceChecks, device: DeviceId, launch: impl FnOnce() -> T) -> T {
        if checks.is_off() {
            self.launched.clear();
            return launch();
        }
        self.lost_before = lost::count(device);
        let (result, launched) = launched_by(launch);
        self.launched = launched;
        result
    }
}
