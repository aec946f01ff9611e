//! Functions of the driver's API. Handles are a device and an index, so that each finds its lock.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_raw_parts;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
use cudarc::driver::sys::CUresult::{self, *};
use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUmemorytype, CUmodule, CUstream, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use crate::context::{Context, Copy, Fault, Place};
use crate::device::{Model, models};
use crate::launch::refused;
use crate::maps::Tiled;
use crate::{memory, say};

/// Version of the driver, of CUDA 13.0.
const VERSION: c_int = 13000;

thread_local! {
    /// Device of the thread's current context.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn contexts() -> &'static [Mutex<Context>] {
    static CONTEXTS: OnceLock<Vec<Mutex<Context>>> = OnceLock::new();
    CONTEXTS.get_or_init(|| models().iter().map(|model| Mutex::new(Context::new(*model))).collect())
}

/// Answers a call. A panic is an unknown error.
fn answer(call: impl FnOnce() -> Result<(), CUresult>) -> CUresult {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => CUDA_ERROR_UNKNOWN,
    }
}

/// Calls `call` with the context of a device, unless a kernel has failed there.
fn with<T>(device: usize, call: impl FnOnce(&mut Context) -> Result<T, CUresult>) -> Result<T, CUresult> {
    let context = contexts().get(device).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let mut context = context.lock().unwrap_or_else(PoisonError::into_inner);
    context.healthy()?;
    call(&mut context)
}

/// Calls `call` with the thread's current context.
fn current<T>(call: impl FnOnce(&mut Context) -> Result<T, CUresult>) -> Result<T, CUresult> {
    with(CURRENT.get().ok_or(CUDA_ERROR_INVALID_CONTEXT)?, call)
}

fn handle<T>(device: usize, index: usize) -> *mut T {
    ((device + 1) << 32 | (index + 1)) as *mut T
}

/// Device and index of a handle.
fn parts<T>(handle: *mut T) -> Result<(usize, usize), CUresult> {
    let [device, index] = [handle as usize >> 32, handle as usize & 0xffff_ffff];
    device.checked_sub(1).zip(index.checked_sub(1)).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// Calls `call` with the context of a stream, and its index.
fn on<T>(stream: *mut T, call: impl FnOnce(&mut Context, usize) -> Result<(), CUresult>) -> CUresult {
    answer(|| {
        let (device, index) = parts(stream)?;
        with(device, |context| call(context, index))
    })
}

fn model(device: CUdevice) -> Result<Model, CUresult> {
    usize::try_from(device).ok().and_then(|device| models().get(device)).copied().ok_or(CUDA_ERROR_INVALID_DEVICE)
}

/// Writes a result.
///
/// # Safety
/// `to` is writable.
unsafe fn give<T>(to: *mut T, value: T) -> Result<(), CUresult> {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

/// Defines functions of the API, whose pointers are as the manual describes.
macro_rules! api {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
            // SAFETY: the caller follows the manual.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    )*};
}

api! {
    cuInit(flags: c_uint) { answer(|| if flags == 0 { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }) }

    cuDriverGetVersion(version: *mut c_int) { answer(|| give(version, VERSION)) }

    cuDeviceGetCount(count: *mut c_int) { answer(|| give(count, models().len() as c_int)) }

    cuDeviceGet(device: *mut CUdevice, ordinal: c_int) { answer(|| model(ordinal).and_then(|_| give(device, ordinal))) }

    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) {
        answer(|| {
            let text = CString::new(model(device)?.name()).expect("no NUL");
            let len = text.as_bytes_with_nul().len().min(len as usize);
            name.copy_from_nonoverlapping(text.as_ptr(), len);
            Ok(())
        })
    }

    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) {
        answer(|| give(bytes, model(device)?.memory() as usize))
    }

    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) {
        answer(|| {
            let known = model(device)?.attribute(attribute);
            let known = known.ok_or_else(|| refused(&format!("{attribute:?}"), CUDA_ERROR_INVALID_VALUE))?;
            give(value, known as c_int)
        })
    }

    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        answer(|| model(device).and_then(|_| give(context, handle(device as usize, 0))))
    }

    cuCtxSetCurrent(context: CUcontext) {
        answer(|| {
            CURRENT.set(if context.is_null() { None } else { Some(parts(context)?.0) });
            Ok(())
        })
    }

    cuDevicePrimaryCtxRelease_v2(device: CUdevice) { answer(|| model(device).map(drop)) }

    cuCtxGetCurrent(context: *mut CUcontext) {
        answer(|| give(context, CURRENT.get().map_or(std::ptr::null_mut(), |device| handle(device, 0))))
    }

    cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        answer(|| {
            let index = current(|context| Ok(context.create_stream()))?;
            give(stream, handle(CURRENT.get().expect("current"), index))
        })
    }

    cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        on(stream, |context, stream| context.wait(stream, parts(event)?.1))
    }

    cuEventCreate(event: *mut CUevent, _flags: c_uint) {
        answer(|| {
            let index = current(|context| Ok(context.create_event()))?;
            give(event, handle(CURRENT.get().expect("current"), index))
        })
    }

    cuEventRecord(event: CUevent, stream: CUstream) {
        on(stream, |context, stream| context.record(parts(event)?.1, stream))
    }

    cuEventSynchronize(event: CUevent) { on(event, |context, event| context.synchronize(event)) }

    cuEventDestroy_v2(event: CUevent) { on(event, |context, event| context.destroy_event(event)) }

    cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize) {
        answer(|| {
            let found = current(|context| {
                context.finish_all()?;
                context.memory.alloc(len)
            })?;
            give(address, found)
        })
    }

    cuMemAllocAsync(address: *mut CUdeviceptr, len: usize, stream: CUstream) {
        on(stream, |context, stream| {
            let found = context.memory.alloc(len).or_else(|_| {
                context.finish(stream)?;
                context.memory.alloc(len)
            })?;
            give(address, found)
        })
    }

    cuMemFree_v2(address: CUdeviceptr) {
        answer(|| current(|context| {
            context.finish_all()?;
            context.memory.free(address)
        }))
    }

    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) {
        on(stream, |context, stream| context.free(stream, address))
    }

    cuMemAllocHost_v2(host: *mut *mut c_void, len: usize) {
        answer(|| memory::alloc_host(len).and_then(|found| give(host, found.cast())))
    }

    cuMemFreeHost(host: *mut c_void) { answer(|| memory::free_host(host.cast())) }

    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream) {
        let (from, to) = (Place::Host(from as usize), Place::Device(to));
        on(stream, |context, stream| context.copy(stream, flat(from, to, len)))
    }

    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream) {
        let (from, to) = (Place::Device(from), Place::Host(to as usize));
        on(stream, |context, stream| context.copy(stream, flat(from, to, len)))
    }

    cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) {
        let copy = &*copy;
        on(stream, |context, stream| {
            let place = |kind: CUmemorytype, host: *const c_void, device, [x, y, pitch]: [usize; 3]| match kind {
                CU_MEMORYTYPE_HOST => Ok(Place::Host(host as usize + y * pitch + x)),
                CU_MEMORYTYPE_DEVICE => Ok(Place::Device(device + (y * pitch + x) as u64)),
                kind => Err(refused(&format!("a copy of {kind:?}"), CUDA_ERROR_INVALID_VALUE)),
            };
            let (from, to) = ([copy.srcXInBytes, copy.srcY, copy.srcPitch], [copy.dstXInBytes, copy.dstY, copy.dstPitch]);
            context.copy(stream, Copy {
                from: place(copy.srcMemoryType, copy.srcHost, copy.srcDevice, from)?,
                to: place(copy.dstMemoryType, copy.dstHost, copy.dstDevice, to)?,
                from_pitch: copy.srcPitch,
                to_pitch: copy.dstPitch,
                width: copy.WidthInBytes,
                height: copy.Height,
            })
        })
    }

    cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        answer(|| {
            let ptx = CStr::from_ptr(image.cast()).to_str().map_err(|_| CUDA_ERROR_INVALID_IMAGE)?;
            let index = current(|context| context.load(ptx))?;
            give(module, handle(CURRENT.get().expect("current"), index))
        })
    }

    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        answer(|| {
            let (device, index) = parts(module)?;
            let name = CStr::from_ptr(name).to_str().map_err(|_| CUDA_ERROR_NOT_FOUND)?;
            let found = with(device, |context| Ok(context.function(index)?.kernel.name == name))?;
            if found { give(function, handle(device, index)) } else { Err(CUDA_ERROR_NOT_FOUND) }
        })
    }

    cuModuleUnload(module: CUmodule) { on(module, |_, _| Ok(())) }

    cuFuncGetAttribute(_value: *mut c_int, attribute: CUfunction_attribute, _function: CUfunction) {
        refused(&format!("{attribute:?}: nothing is assembled here"), CUDA_ERROR_NOT_SUPPORTED)
    }

    cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int) {
        on(function, |context, function| {
            let model = context.model;
            match (attribute, usize::try_from(value)) {
                (CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, Ok(bytes)) => {
                    context.function(function)?.set_dynamic(bytes, model)
                }
                _ => Err(refused(&format!("{attribute:?} = {value}"), CUDA_ERROR_INVALID_VALUE)),
            }
        })
    }

    cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        on(stream, |context, stream| {
            let (model, sizes) = (context.model, [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]]);
            let function = context.function(parts(function)?.1)?;
            let launch = function.launch(sizes, shared as usize, parameters.cast(), model)?;
            context.launch(stream, launch)
        })
    }

    cuTensorMapEncodeTiled(
        map: *mut CUtensorMap, kind: CUtensorMapDataType, rank: c_uint, address: *mut c_void, dims: *const u64,
        strides: *const u64, tile: *const c_uint, element_strides: *const c_uint, interleave: CUtensorMapInterleave,
        swizzle: CUtensorMapSwizzle, _promotion: CUtensorMapL2promotion, fill: CUtensorMapFloatOOBfill
    ) {
        answer(|| {
            let rank = rank as usize;
            if !(1..=5).contains(&rank) || !(map as usize).is_multiple_of(64) {
                return Err(refused("a tensor map's rank or its own address", CUDA_ERROR_INVALID_VALUE));
            }
            let tiled = Tiled {
                address: address as u64,
                kind,
                dims: from_raw_parts(dims, rank).to_vec(),
                strides: if rank == 1 { vec![] } else { from_raw_parts(strides, rank - 1).to_vec() },
                tile: from_raw_parts(tile, rank).to_vec(),
                element_strides: from_raw_parts(element_strides, rank).to_vec(),
                interleave,
                swizzle,
                nan_fill: fill != CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            };
            let bytes = tiled.encode();
            let bytes = bytes.map_err(|rule| refused(&format!("a tensor map: {rule}"), CUDA_ERROR_INVALID_VALUE))?;
            map.cast::<[u8; 128]>().write(bytes);
            Ok(())
        })
    }

    cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        answer(|| give(text, CString::new(format!("{error:?}")).expect("no NUL").into_raw()))
    }

    cuGetErrorString(error: CUresult, text: *mut *const c_char) {
        answer(|| give(text, meaning(error).as_ptr()))
    }

    fakeCudaInject(device: c_int, fault: *const c_char) {
        answer(|| {
            let text = CStr::from_ptr(fault).to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
            let fault = Fault::parse(text).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            with(device as usize, |context| {
                context.inject(fault);
                Ok(())
            })
        })
    }
}

/// A copy of one row.
fn flat(from: Place, to: Place, len: usize) -> Copy {
    Copy { from, to, from_pitch: len, to_pitch: len, width: len, height: 1 }
}

/// Text of an error, as the driver has it.
fn meaning(error: CUresult) -> &'static CStr {
    match error {
        CUDA_ERROR_INVALID_VALUE => c"invalid argument",
        CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
        CUDA_ERROR_INVALID_DEVICE => c"invalid device ordinal",
        CUDA_ERROR_INVALID_CONTEXT => c"invalid device context",
        CUDA_ERROR_NO_BINARY_FOR_GPU => c"no kernel image is available for execution on the device",
        CUDA_ERROR_INVALID_PTX => c"a PTX JIT compilation failed",
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION => c"the provided PTX was compiled with an unsupported toolchain.",
        CUDA_ERROR_INVALID_HANDLE => c"invalid resource handle",
        CUDA_ERROR_NOT_FOUND => c"named symbol not found",
        CUDA_ERROR_ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        CUDA_ERROR_LAUNCH_TIMEOUT => c"the launch timed out and was terminated",
        CUDA_ERROR_MISALIGNED_ADDRESS => c"misaligned address",
        CUDA_ERROR_LAUNCH_FAILED => c"unspecified launch failure",
        CUDA_ERROR_INVALID_CLUSTER_SIZE => c"cluster misconfiguration",
        error => {
            say(&format!("{error:?} has no text"));
            c"unknown error"
        }
    }
}
