//! The first time that a process uses a kernel with some compile-time parameters on a device, its result is compared with the scalar
//! reference. What is wrong is struck off, and the call computed again on the next path.
//!
//! ```text
//! launch ─ all kernels known to be right ─▶ result
//!    │ a new one
//!    ▼
//! read back, compare ─ right ─▶ result        cast   sampled rows, bit for bit, scales and amax included
//!    │ wrong                                  GEMM   sampled elements against f64 dot products of the decoded codes
//!    ▼
//! strike off, log, launch the next path       the host where none is left
//! ```
mod cast;
mod gemm;
mod read;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Instant;

use burn_backend::DeviceId;
pub(super) use cast::quantize;
use cubecl::client::ComputeClient;
use cubecl::future::block_on;
use cubecl::prelude::Runtime;
use float8_kernels::{Granularity, KernelVariant, device_key, launched_by};
pub(super) use gemm::{Product, multiply};
use parking_lot::{Mutex, RwLock};

use super::{SelfCheckReport, lost};
use crate::config::SelfCheck;
use crate::error::{DeviceError, SelfCheckFailure};

/// Of one device, whatever backends are on it.
pub(super) struct DeviceChecks {
    off: AtomicBool,
    /// Of checks, of which there is one at a time: who waits for another's learns what it has found.
    turn: Mutex<()>,
    found: RwLock<Found>,
    prepared: OnceLock<Result<(), DeviceError>>,
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

/// The same for all clients of one device.
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
            turn: Mutex::default(),
            found: RwLock::default(),
            prepared: OnceLock::new(),
        })
    };
    DEVICES.write().entry(key).or_insert_with(new).clone()
}

/// What `FLOAT8_SELF_CHECK` says, if it is set.
fn variable() -> Result<Option<SelfCheck>, DeviceError> {
    match std::env::var("FLOAT8_SELF_CHECK") {
        Err(_) => Ok(None),
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) if value == "first_use" => Ok(Some(SelfCheck::FirstUse)),
        Ok(value) if value == "off" => Ok(Some(SelfCheck::Off)),
        Ok(value) => Err(DeviceError::SelfCheckVariable { value }),
    }
}

impl DeviceChecks {
    /// Checks from here on, or not, as a configuration says, unless the environment says otherwise.
    pub(super) fn set(&self, asked_for: SelfCheck) -> Result<(), DeviceError> {
        let choice = variable()?.unwrap_or(asked_for);
        self.off.store(choice == SelfCheck::Off, Ordering::Relaxed);
        Ok(())
    }

    fn is_off(&self) -> bool {
        self.off.load(Ordering::Relaxed)
    }

    /// What `prepare` gives, which runs once, and not where nothing is checked.
    pub(super) fn prepared(&self, prepare: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        if self.is_off() { Ok(()) } else { self.prepared.get_or_init(prepare).clone() }
    }

    pub(super) fn report(&self, device: DeviceId) -> SelfCheckReport {
        let Found { right, failures, seconds, .. } = &*self.found.read();
        let (kernels, seconds, failures) = (right.len(), *seconds, failures.clone());
        SelfCheckReport { kernels, seconds, failures, off: self.is_off(), lost: lost::first(device) }
    }

    /// The first call that was wrong, or the first task that the device has lost.
    pub(super) fn fault(&self, device: DeviceId) -> Option<DeviceError> {
        if let Some(message) = lost::first(device) {
            return Some(DeviceError::TaskPanicked { message });
        }
        self.found.read().failures.first().cloned().map(DeviceError::SelfCheck)
    }

    /// Whether what was launched for this call, on this path, is right: `compare` says so of the kernels that are new.
    fn is_right<R: Runtime>(
        &self,
        (client, device): (&ComputeClient<R>, DeviceId),
        launched: &[KernelVariant],
        (granularities, call_and_path): (Option<[Granularity; 2]>, impl FnOnce() -> [String; 2]),
        compare: impl FnOnce() -> Result<(), String>,
    ) -> bool {
        let known = || {
            let Found { right, wrong, .. } = &*self.found.read();
            let is_wrong = launched.iter().any(|kernel| wrong.contains(kernel));
            (is_wrong || launched.iter().all(|kernel| right.contains(kernel))).then_some(!is_wrong)
        };
        if let Some(known) = known() {
            return known;
        }
        let _turn = self.turn.lock();
        if let Some(known) = known() {
            return known;
        }
        // What the device takes to compile and to compute is no part of what checks cost.
        let done = block_on(client.sync()).map_err(|error| error.to_string());
        let start = Instant::now();
        let compared = done.and_then(|()| compare());
        let mut found = self.found.write();
        found.seconds += start.elapsed().as_secs_f64();
        let Err(mismatch) = compared else {
            found.right.extend(launched);
            return true;
        };
        let mut new: Vec<_> = launched.iter().filter(|kernel| !found.right.contains(kernel)).copied().collect();
        new.sort_unstable();
        new.dedup();
        let [call, path] = call_and_path();
        // What the call has lost is made up for.
        let reasons = [mismatch].into_iter().chain(lost::take(device)).collect::<Vec<_>>();
        let kernels = new.iter().map(|kernel| kernel.name).collect();
        let failure = SelfCheckFailure { kernels, call, path, granularities, found: reasons.join("; ") };
        log::error!("{failure}; this is not used again");
        found.wrong.extend(new);
        found.failures.push(failure);
        FAILURES.fetch_add(1, Ordering::AcqRel);
        false
    }
}

/// What `launch` gives, with the kernels that it launches; none where nothing is checked.
fn recorded<T>(checks: &DeviceChecks, launch: impl FnOnce() -> T) -> (T, Vec<KernelVariant>) {
    if checks.is_off() { (launch(), vec![]) } else { launched_by(launch) }
}
