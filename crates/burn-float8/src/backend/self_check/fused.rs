//! Fused operations: sampled rows against Burn's operations.
use burn_backend::DeviceId;
use cubecl::client::ComputeClient;
use cubecl::prelude::Runtime;
use float8_kernels::KernelError;
use float8_kernels::fused::{FusedKernel, strike_fused};

use super::{Call, DeviceChecks, Mismatch, Verdict};

/// What `launch` gives, if `compare` finds nothing wrong with it.
///
/// # Errors
///
/// Those of `launch`; [`KernelError::StruckOff`] if it was wrong.
pub(in crate::backend) fn fused<R: Runtime, T>(
    client: &ComputeClient<R>,
    checks: &DeviceChecks,
    device: DeviceId,
    (kernel, call): (FusedKernel, impl Fn() -> String),
    launch: impl Fn() -> Result<T, KernelError>,
    compare: impl Fn(&T) -> Result<(), Mismatch>,
) -> Result<T, KernelError> {
    let mut under_way = Call::new();
    loop {
        let made = under_way.record(checks, device, &launch)?;
        let name = || [call(), "fused kernels".into()];
        match checks.judge((client, device), &mut under_way, (None, name), || compare(&made)) {
            Verdict::Right => return Ok(made),
            Verdict::Again => {}
            Verdict::Wrong => {
                strike_fused(client, kernel);
                return Err(KernelError::StruckOff);
            }
        }
    }
}
