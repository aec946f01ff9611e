//! Judges each kernel variant once per process and device, on generated operands, before it touches
//! the user's data.
//!
//! ```text
//! variant ─ known to be right ─▶ launch
//!    │ new
//!    ▼
//! judge ─ right ─▶ launch        GEMMs and casts bit for bit, fused operations within rounding
//!    │ wrong, refused or lost
//!    ▼
//! disable, log, take the next    the host if none is left; for fused operations Burn's
//! ```
use std::collections::HashMap;
use std::env::VarError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Instant;

use burn_backend::DeviceId;
use cubecl::client::ComputeClient;
use cubecl::future::block_on;
use cubecl::prelude::Runtime;
use float8_kernels::adamw::disable_adamw;
use float8_kernels::attention::{AttentionInputs, HeadsView, disable_attention};
use float8_kernels::check::{AdamWVariant, AttentionVariant, CastVariant, Flaw, FusedVariant, Variant};
use float8_kernels::fused::disable_fused;
use float8_kernels::{
    GemmDevice, GemmProblem, GemmVariant, HalfGemm, HalfGemmVariant, KernelError, cast_instructions, device_key,
    disable_casts, disable_half_gemm, disable_path, select,
};
use parking_lot::{Mutex, RwLock};

use super::{SelfCheckReport, device_errors};
use crate::config::SelfCheck;
use crate::error::{Float8Error, SelfCheckFailure};

/// Self-checks of one device, shared by all backends on it.
pub(super) struct DeviceChecks {
    device: DeviceId,
    /// Whether a configuration or the environment turns checks off.
    off: AtomicBool,
    /// Device parameters for GEMM kernel selection.
    gemm_device: GemmDevice,
    /// Whether the device is a CPU. Kernels on CPUs are not checked.
    is_cpu: bool,
    /// Held while a variant is judged. A thread that reaches another new variant waits.
    turn: Mutex<()>,
    found: RwLock<SelfChecked>,
    prepared: OnceLock<Result<(), Float8Error>>,
}

#[derive(Default)]
struct SelfChecked {
    /// Whether each variant is right.
    judged: HashMap<Variant, bool>,
    failures: Vec<SelfCheckFailure>,
    seconds: f64,
}

/// Number of wrong variants, on all devices.
static FAILURES: AtomicU64 = AtomicU64::new(0);

/// Number of judgments on all devices: the seed of the operands.
static SEED: AtomicU64 = AtomicU64::new(1);

/// Whether no kernel was wrong and no launch was lost, on any device. Cheap enough for every call.
pub(super) fn is_faultless() -> bool {
    FAILURES.load(Ordering::Acquire) == 0 && device_errors::is_nothing()
}

/// The checks of a client's device: one value for all clients of the device.
pub(super) fn of<R: Runtime>(client: &ComputeClient<R>, device: DeviceId) -> Arc<DeviceChecks> {
    static DEVICES: LazyLock<RwLock<HashMap<usize, Arc<DeviceChecks>>>> = LazyLock::new(RwLock::default);
    let key = device_key(client);
    if let Some(known) = DEVICES.read().get(&key) {
        return known.clone();
    }
    let new = || {
        device_errors::watch();
        Arc::new(DeviceChecks {
            device,
            off: AtomicBool::new(variable() == Ok(Some(SelfCheck::Off))),
            gemm_device: GemmDevice::of(client),
            is_cpu: client.properties().hardware.num_cpu_cores.is_some(),
            turn: Mutex::default(),
            found: RwLock::default(),
            prepared: OnceLock::new(),
        })
    };
    DEVICES.write().entry(key).or_insert_with(new).clone()
}

/// Value of `FLOAT8_SELF_CHECK`, if set.
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
    /// Turns checks on or off as the configuration requests. The environment variable takes
    /// precedence.
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

    /// Result of `prepare`, which runs once. Skipped if checks are off.
    pub(super) fn prepared(&self, prepare: impl FnOnce() -> Result<(), Float8Error>) -> Result<(), Float8Error> {
        if self.is_off() { Ok(()) } else { self.prepared.get_or_init(prepare).clone() }
    }

    pub(super) fn report(&self) -> SelfCheckReport {
        let SelfChecked { judged, failures, seconds } = &*self.found.read();
        let (kernels, seconds, failures) =
            (judged.values().filter(|right| **right).count(), *seconds, failures.clone());
        SelfCheckReport { kernels, seconds, failures, off: self.is_off(), lost: device_errors::first(self.device) }
    }

    /// Disables cast instructions that are wrong for `variant`, until the selected ones are right.
    ///
    /// # Errors
    /// [`KernelError::Disabled`] if none are.
    pub(super) fn cast<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        variant: impl Fn() -> Result<CastVariant, KernelError>,
    ) -> Result<(), KernelError> {
        while !self.is_off() {
            let variant = variant()?;
            let Some(instructions) = variant.instructions else { return Err(KernelError::Disabled) };
            let disable = || {
                if cast_instructions(client) == Some(instructions) {
                    disable_casts(client);
                }
            };
            if self.is_right(client, Variant::Cast(variant), disable) {
                break;
            }
        }
        Ok(())
    }

    /// Selects a correct variant of a GEMM. `shape` replaces the shape of the judged product.
    ///
    /// # Errors
    /// [`KernelError::Disabled`] if none is.
    pub(super) fn gemm<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        problem: &GemmProblem,
        shape: Option<[usize; 3]>,
    ) -> Result<GemmVariant, KernelError> {
        loop {
            let on = &self.gemm_device;
            let variant = select(on, problem, &on.disabled()).ok_or(KernelError::Disabled)?;
            let mut judged = variant.judged();
            judged.small.shape.product = shape.unwrap_or(judged.small.shape.product);
            let disable = || disable_path(client, variant.path, problem.shape.granularities);
            if self.is_right(client, Variant::Gemm(judged), disable) {
                return Ok(variant);
            }
        }
    }

    /// Variant of a product of 16-bit matrices. Disables their kernel if it is wrong.
    ///
    /// # Errors
    /// The errors of [`HalfGemm::run`]: [`KernelError::Disabled`] if it is wrong.
    pub(super) fn half_gemm<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        gemm: &HalfGemm<'_>,
    ) -> Result<HalfGemmVariant, KernelError> {
        let variant = gemm.variant(client)?;
        let judged = Variant::HalfGemm(variant.judged());
        let is_right = self.is_right(client, judged, || disable_half_gemm(client));
        is_right.then_some(variant).ok_or(KernelError::Disabled)
    }

    /// Checks a fused operation and disables it if it is wrong.
    pub(super) fn fused<R: Runtime>(&self, client: &ComputeClient<R>, variant: FusedVariant) {
        self.is_right(client, Variant::Fused(variant), || disable_fused(client, variant.kernel));
    }

    /// Checks the kernel that attention of these inputs runs, with `dy` for backward. Disables wrong
    /// kernels until it is right.
    ///
    /// # Errors
    /// [`KernelError::Disabled`] if none is.
    pub(super) fn attention<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        inputs: &AttentionInputs,
        dy: Option<&HeadsView>,
    ) -> Result<(), KernelError> {
        loop {
            let variant = AttentionVariant::of(client, inputs, dy)?;
            let disable = || disable_attention(client, variant.kernel);
            if self.is_right(client, Variant::Attention(variant), disable) {
                return Ok(());
            }
        }
    }

    /// Whether AdamW is right. Disables its kernel if not.
    pub(super) fn adamw<R: Runtime>(&self, client: &ComputeClient<R>, variant: AdamWVariant) -> bool {
        self.is_right(client, Variant::AdamW(variant), || disable_adamw(client))
    }

    /// Whether a variant is right. The first call judges it and calls `disable` on failure.
    fn is_right<R: Runtime>(&self, client: &ComputeClient<R>, variant: Variant, disable: impl FnOnce()) -> bool {
        let known = || self.is_off().then_some(true).or_else(|| self.found.read().judged.get(&variant).copied());
        if let Some(known) = known() {
            return known;
        }
        let _turn = self.turn.lock();
        if let Some(known) = known() {
            return known;
        }
        // An error that the device has not reported yet belongs to an earlier launch.
        if let Err(error) = block_on(client.sync()) {
            device_errors::push_reported(self.device, error);
        }
        let start = Instant::now();
        let lost_before = device_errors::count(self.device);
        let judge = || variant.judge(client, SEED.fetch_add(1, Ordering::Relaxed));
        let mut judged = judge();
        let mut reasons = device_errors::take_after(self.device, lost_before);
        if judged.is_err() && !reasons.is_empty() {
            judged = judge();
            reasons = device_errors::take_after(self.device, lost_before);
        }
        let flaw = match judged {
            Err(Flaw::Unsupported(KernelError::Disabled)) => Some(KernelError::Disabled.to_string()),
            // The launch returns the same error.
            Err(Flaw::Unsupported(_)) | Ok(()) => None,
            Err(flaw) => Some(flaw.to_string()),
        };
        let is_right = flaw.is_none();
        let mut found = self.found.write();
        found.seconds += start.elapsed().as_secs_f64();
        if let Some(flaw) = flaw {
            disable();
            let reason = [flaw].into_iter().chain(reasons).collect::<Vec<_>>().join("; ");
            let (path, granularities) = match variant {
                Variant::Cast(cast) => (format!("casts by {}", cast.instructions.unwrap_or("none")), None),
                Variant::Gemm(gemm) => (gemm.path.to_string(), Some(gemm.small.shape.granularities)),
                Variant::HalfGemm(gemm) => (format!("high precision by {} wgmma", gemm.small.dtype), None),
                Variant::Fused(_) => ("fused operations".into(), None),
                Variant::AdamW(_) => ("AdamW in one pass".into(), None),
                Variant::Attention(attention) => (format!("attention by {}", attention.kernel.name()), None),
            };
            let failure = SelfCheckFailure { call: variant.to_string(), path, granularities, found: reason };
            log::error!("Float8: {failure}; this is disabled");
            found.failures.push(failure);
            FAILURES.fetch_add(1, Ordering::AcqRel);
        }
        found.judged.insert(variant, is_right);
        is_right
    }
}
