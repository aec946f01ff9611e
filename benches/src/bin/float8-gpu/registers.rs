//! Registers and local memory of the GEMMs on this device, as assembled by the driver.
//!
//! The driver assembles NVRTC's PTX, as with CubeCL. `ptxas` may give other numbers.

use std::ffi::{CStr, CString, c_char};

use codegen::device::{GenerateCuda, Generated, OfflineDevice, take};
use cubecl::cuda::install::{cccl_include_path, include_path};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cudarc::driver::{result as driver, sys};
use cudarc::nvrtc::result as nvrtc;
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
pub fn print() -> Result<(), String> {
    let failed = |error: driver::DriverError| format!("the driver: {error}");
    driver::init().map_err(failed)?;
    let device = driver::device::get(0).map_err(failed)?;
    let attribute = |attribute| {
        // SAFETY: the driver has just returned the device.
        unsafe { driver::device::get_attribute(device, attribute) }.map_err(failed)
    };
    let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let sms = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    println!("compute capability {major}.{minor}, {sms} SMs");
    let kernels = kernels(OfflineDevice { sm: (10 * major + minor) as u16, sms: sms as u16 })?;
    // SAFETY: each thread that uses the context makes it current, and it lives as long as the
    // process.
    let context = unsafe { driver::primary_ctx::retain(device) }.map_err(failed)? as usize;
    // NVRTC takes seconds for each.
    std::thread::scope(|scope| {
        let threads = kernels
            .iter()
            .map(|(what, kernel)| (what, kernel, scope.spawn(move || attributes(kernel, context as sys::CUcontext))));
        for (what, kernel, thread) in threads.collect::<Vec<_>>() {
            let [registers, local] = thread.join().map_err(|_| format!("{what}: a panic"))??;
            let shared = kernel.dynamic_shared;
            println!(
                "{}, {what}: {registers} registers, {local} local bytes, {shared} bytes of shared memory",
                kernel.name
            );
        }
        Ok(())
    })
}

/// CUDA source of each GEMM for this device, with a description.
fn kernels(device: OfflineDevice) -> Result<Vec<(String, Generated)>, String> {
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
        let product = scaled_gemm(&client, &a, &b, None, StorageType::Scalar(out), config);
        product.map_err(|error| error.to_string())?;
        cubecl::future::block_on(client.sync()).map_err(|error| format!("{error:?}"))?;
        let what = format!("{m}x{n}x{k} {left},{right}{}", if use_fast_accum { " fast" } else { "" });
        let gemms = take().into_iter().filter(|kernel| kernel.name.starts_with("gemm_"));
        kernels.extend(gemms.map(|kernel| (what.clone(), kernel)));
    }
    Ok(kernels)
}

/// Registers, and bytes of local memory.
fn attributes(kernel: &Generated, context: sys::CUcontext) -> Result<[i32; 2], String> {
    let ptx = ptx(kernel)?;
    let name = CString::new(kernel.name.clone()).map_err(|error| error.to_string())?;
    let failed = |error: driver::DriverError| format!("{}: the driver: {error}", kernel.name);
    // SAFETY: the context is retained. PTX ends with a zero. The function is used while its module
    // is loaded.
    unsafe {
        driver::ctx::set_current(context).map_err(failed)?;
        let module = driver::module::load_data(ptx.as_ptr().cast()).map_err(failed)?;
        let function = driver::module::get_function(module, name).map_err(failed)?;
        let attribute = |attribute| driver::function::get_function_attribute(function, attribute).map_err(failed);
        let registers = attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local = attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        driver::module::unload(module).map_err(failed)?;
        Ok([registers, local])
    }
}

/// PTX with the options that CubeCL passes to NVRTC.
fn ptx(kernel: &Generated) -> Result<Vec<c_char>, String> {
    let source = CString::new(kernel.source.clone()).map_err(|error| error.to_string())?;
    let own = if kernel.sm >= 90 { "a" } else { "" };
    let mut options = vec![format!("--gpu-architecture=sm_{}{own}", kernel.sm), "-lineinfo".into()];
    options.extend([include_path(), cccl_include_path()].map(|path| format!("--include-path={}", path.display())));
    let program = nvrtc::create_program(&source, None).map_err(|error| format!("NVRTC: {error}"))?;
    // SAFETY: the program is valid until it is destroyed, and its log ends with a zero.
    unsafe {
        let compiled = nvrtc::compile_program(program, &options);
        let ptx = compiled.and_then(|()| nvrtc::get_ptx(program)).map_err(|error| {
            let log = nvrtc::get_program_log(program).unwrap_or_else(|_| vec![0]);
            format!("{}: NVRTC: {error}: {}", kernel.name, CStr::from_ptr(log.as_ptr()).to_string_lossy())
        });
        nvrtc::destroy_program(program).map_err(|error| format!("NVRTC: {error}"))?;
        ptx
    }
}
