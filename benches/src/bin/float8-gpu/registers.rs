//! Registers and local memory of the GEMMs on this device, as assembled by the driver.
//!
//! The driver assembles NVRTC's PTX, as with CubeCL. `ptxas` may give other numbers.

use anyhow::{Context, anyhow};
use codegen::device::{GenerateCuda, Generated, OfflineDevice, take};
use cubecl::cuda::install::{cccl_include_path, include_path};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cudarc::driver::{CudaContext, sys::CUdevice_attribute};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use float8_kernels::{Format, GemmConfig, Granularity, Operand, row_words, scaled_gemm};

/// M, N and K.
const SHAPE: [usize; 3] = [4096; 3];

/// Granularities, and whether sums stay in the tensor cores' accumulators.
const GEMMS: [([Granularity; 2], bool); 3] = [
    ([Granularity::Tensor; 2], false),
    ([Granularity::Tensor; 2], true),
    ([Granularity::Block1x128, Granularity::Block128x128], false),
];

/// Prints a line for each GEMM of [`GEMMS`].
///
/// # Errors
/// An error of the driver, of NVRTC or of CubeCL.
pub fn print() -> anyhow::Result<()> {
    let context = CudaContext::new(0)?;
    let (major, minor) = context.compute_capability()?;
    let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    println!("compute capability {major}.{minor}, {sms} SMs");
    let kernels = kernels(OfflineDevice { sm: (10 * major + minor) as u16, sms: sms as u16 })?;
    // NVRTC takes seconds for each.
    std::thread::scope(|scope| {
        let compile = |(what, kernel)| {
            let context = context.clone();
            (what, kernel, scope.spawn(move || registers(&context, kernel)))
        };
        let threads: Vec<_> = kernels.iter().map(|(what, kernel)| compile((what, kernel))).collect();
        for (what, kernel, thread) in threads {
            let Generated { name, dynamic_shared: shared, .. } = kernel;
            let of_kernel = thread.join().map_err(|_| anyhow!("a panic"))?;
            let [registers, local] = of_kernel.with_context(|| format!("{name}, {what}"))?;
            println!("{name}, {what}: {registers} registers, {local} local bytes, {shared} bytes of shared memory");
        }
        Ok(())
    })
}

/// CUDA source of each GEMM for this device, with a description.
fn kernels(device: OfflineDevice) -> anyhow::Result<Vec<(String, Generated)>> {
    let [m, n, k] = SHAPE;
    let client = GenerateCuda::client(&device);
    let operand = |rows, granularity: Granularity| Operand {
        codes: client.empty(4 * rows * row_words(k)),
        inv_scale: client.empty(4 * granularity.scale_words(rows, k)),
        rows,
        k,
        format: Format::E4m3,
        granularity,
        power_of_two: false,
    };
    let mut kernels = vec![];
    for ([left, right], use_fast_accum) in GEMMS {
        let (a, b) = (operand(m, left), operand(n, right));
        let (config, out) = (GemmConfig { use_fast_accum, emulate: false }, ElemType::Float(FloatKind::BF16));
        scaled_gemm(&client, &a, &b, None, StorageType::Scalar(out), config)?;
        cubecl::future::block_on(client.sync()).map_err(|error| anyhow!("{error:?}"))?;
        let what = format!("{m}x{n}x{k} {left},{right}{}", if use_fast_accum { " fast" } else { "" });
        let gemms = take().into_iter().filter(|kernel| kernel.name.starts_with("gemm_"));
        kernels.extend(gemms.map(|kernel| (what.clone(), kernel)));
    }
    Ok(kernels)
}

/// Registers, and bytes of local memory, with the options that CubeCL passes to NVRTC.
fn registers(context: &std::sync::Arc<CudaContext>, kernel: &Generated) -> anyhow::Result<[i32; 2]> {
    let own = if kernel.sm >= 90 { "a" } else { "" };
    let options = vec![format!("--gpu-architecture=sm_{}{own}", kernel.sm), "-lineinfo".into()];
    let include_paths = [include_path(), cccl_include_path()].map(|path| path.display().to_string()).to_vec();
    let options = CompileOptions { options, include_paths, ..CompileOptions::default() };
    let ptx = compile_ptx_with_opts(&kernel.source, options).map_err(|error| anyhow!("NVRTC: {error:?}"))?;
    let function = context.load_module(ptx)?.load_function(&kernel.name)?;
    Ok([function.num_regs()?, function.local_size_bytes()?])
}
