//! A device is tried out before it is relied on: what its kernels are compiled with, before anything touches it; then a cast and a
//! product whose every bit is known.
use burn_backend::{DType, DeviceId};
use burn_cubecl::CubeRuntime;
use cubecl::client::ComputeClient;
use float8_kernels::{Cast, Format, GemmConfig, Granularity, KernelError, MatrixView, Orientation, ScaleMode};

use super::ScaleFrom;
use super::self_check::{DeviceChecks, Product, multiply, quantize};
use crate::error::Float8Error;

/// Rows, columns and contraction.
const SIDE: usize = 64;

/// The largest of e4m3, so that the scale is 1; sums of 64 products of it have 12 bits, which every accumulator keeps.
const MAX: f32 = 448.0;

/// x and w, of which each is cast by rows: -MAX, 0 and MAX.
fn values(seed: usize) -> Vec<f32> {
    (0..SIDE * SIDE).map(|i| [0.0, MAX, -MAX, MAX][(i * (i + seed) + i / 7) % 4]).collect()
}

/// Whether what the runtime compiles kernels with is there. It must be asked before the device has a client, which panics without a driver.
///
/// # Errors
///
/// What is missing.
pub(super) fn setup<R: CubeRuntime>() -> Result<(), Float8Error> {
    #[cfg(feature = "cuda")]
    if core::any::TypeId::of::<R>() == core::any::TypeId::of::<cubecl::cuda::CudaRuntime>() {
        use std::sync::OnceLock;
        static SETUP: OnceLock<Result<(), Float8Error>> = OnceLock::new();
        return SETUP.get_or_init(|| Ok(device_select::cuda_setup().map(drop)?)).clone();
    }
    Ok(())
}

/// Whether the device computes.
///
/// # Errors
///
/// What is wrong on every path.
pub(super) fn run<R: CubeRuntime>(
    client: &ComputeClient<R>,
    checks: &DeviceChecks,
    device: DeviceId,
) -> Result<(), Float8Error> {
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let before = checks.report(device).failures.len();
    let failed = |what: &'static str| {
        move |error: KernelError| {
            let failures = checks.report(device).failures;
            let last = failures.get(before..).and_then(<[_]>::last).filter(|_| error == KernelError::StruckOff);
            let reason = last.map_or_else(|| error.to_string(), ToString::to_string);
            Float8Error::Preflight { what, reason }
        }
    };
    let operand = |values: &[f32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let handle = client.create_from_slice(&bytes);
        let x = MatrixView { handle, shape: [SIDE; 2], strides: [SIDE, 1], dtype: DType::F32.into() };
        let asked = (cast, Orientation::Rows);
        let done = quantize(client, checks, device, (&x, DType::F32), asked, &ScaleFrom::Dynamic);
        done.map(|done| done.rows.expect("asked for")).map_err(failed("cast"))
    };
    let (x, w) = (values(1), values(2));
    let (a, b) = (operand(&x)?, operand(&w)?);
    let pairs = |i: usize| x[i / SIDE * SIDE..][..SIDE].iter().zip(&w[i % SIDE * SIDE..][..SIDE]);
    let want: Vec<f32> = (0..SIDE * SIDE).map(|i| pairs(i).map(|(x, w)| x * w).sum()).collect();
    let (dtype, config) = (DType::F32, GemmConfig::default());
    let exact = Some(&want[..]);
    let product = Product { a: &a, b: &b, bias: None, bias_dtype: dtype, groups: None, dtype, config, exact };
    multiply(client, checks, device, &product).map(drop).map_err(failed("GEMM"))
}
