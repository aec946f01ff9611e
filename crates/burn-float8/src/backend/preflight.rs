//! Checks a device before its first use: the kernel compiler, then a cast and a GEMM of one tile.
use burn_backend::DType;
use burn_cubecl::CubeRuntime;
use cubecl::client::ComputeClient;
use float8_kernels::check::CastVariant;
use float8_kernels::{
    Cast, Format, GemmProblem, GemmShape, Granularity, KernelError, MatrixView, Orientation, ScaleMode,
};

use super::self_check::DeviceChecks;
use crate::error::Float8Error;

/// Rows, columns and contraction.
const SIDE: usize = 64;

/// Checks that the runtime's kernel compiler is present. Call it before creating the device's
/// client, which panics without a driver.
///
/// # Errors
///
/// If a tool or library is missing.
pub(super) fn setup<R: CubeRuntime>() -> Result<(), Float8Error> {
    #[cfg(feature = "cuda")]
    if core::any::TypeId::of::<R>() == core::any::TypeId::of::<cubecl::cuda::CudaRuntime>() {
        use std::sync::OnceLock;
        static SETUP: OnceLock<Result<(), Float8Error>> = OnceLock::new();
        return SETUP.get_or_init(|| Ok(device_select::cuda_setup().map(drop)?)).clone();
    }
    Ok(())
}

/// Checks a cast and a GEMM of one tile.
///
/// # Errors
///
/// If the GEMM or cast is wrong on every path.
pub(super) fn run<R: CubeRuntime>(client: &ComputeClient<R>, checks: &DeviceChecks) -> Result<(), Float8Error> {
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let dtype = DType::F32.into();
    let failed = |what: &'static str| {
        move |error: KernelError| {
            let last = checks.report().failures.pop();
            let reason = last.map_or_else(|| error.to_string(), |last| last.to_string());
            Float8Error::Preflight { what, reason }
        }
    };
    let handle = client.empty(SIDE * SIDE * 4);
    let x = MatrixView { handle, shape: [SIDE; 2], strides: [SIDE, 1], dtype };
    let variant = || CastVariant::of(client, &x, cast, Orientation::Rows, None);
    checks.cast(client, variant).map_err(failed("cast"))?;
    let shape = GemmShape {
        product: [SIDE; 3],
        granularities: [Granularity::Tensor; 2],
        power_of_two: false,
        use_fast_accum: false,
        groups: None,
    };
    let problem = GemmProblem { formats: [Format::E4m3; 2], shape, bias: None, dtype, emulate: false };
    checks.gemm(client, &problem, Some(shape.product)).map(drop).map_err(failed("GEMM"))
}
