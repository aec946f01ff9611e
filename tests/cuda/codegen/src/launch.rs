//! Arguments of a launch in the order of CubeCL's CUDA runtime: tensor maps by value, their buffers
//! and the others, the dynamic metadata. The info is last, by value.

use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_core::server::{Binding, KernelArguments, TensorMapMeta};
use cubecl_runtime::tma::{OobFill, TensorMapFormat, TensorMapInterleave, TensorMapSwizzle, TiledArgs};
use ptx_interpreter::{Accumulator, Arg, Buffer, Kernel, Launch, TensorFloat, TensorMap};

use crate::fault::Change;
use crate::memory::OfflineResource;

/// A kernel and its geometry.
pub(crate) struct Request<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: usize,
    pub(crate) seed: u64,
    pub(crate) accumulator: Accumulator,
    /// Change of the bytes that the kernel reads from a buffer.
    pub(crate) read: Option<(usize, Change)>,
}

/// Finds the memory of an argument.
pub(crate) type Resources<'a> = &'a mut dyn FnMut(Binding) -> Result<OfflineResource, String>;

impl Request<'_> {
    /// Runs the kernel on the memory that `resource` finds.
    pub(crate) fn run(&self, resource: Resources<'_>, arguments: KernelArguments) -> Result<(), String> {
        let KernelArguments { buffers, info, tensor_maps } = arguments;
        let mut launch = Launch {
            grid: self.grid,
            block: self.block,
            dynamic_shared: self.dynamic_shared,
            seed: self.seed,
            accumulator: self.accumulator,
            ..Launch::default()
        };
        let mut changed = vec![];
        let mut resource = |position: usize, binding| {
            let resource = resource(binding)?;
            let Some((_, change)) = self.read.filter(|(at, _)| *at == position) else {
                return Ok::<_, String>(buffer(resource));
            };
            // SAFETY: the reference ends here.
            let mut bytes = unsafe { resource.bytes() }.to_vec();
            change(&mut bytes);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            changed.push(bytes);
            let bytes = changed.last_mut().expect("pushed");
            // SAFETY: `changed` outlives the run, and moving a vector does not move its bytes.
            Ok(unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) })
        };
        for (index, tensor) in tensor_maps.iter().enumerate() {
            launch.buffers.push(resource(index, tensor.binding.clone())?);
            launch.maps.push(tensor_map(&tensor.map, index)?);
            launch.args.push(Arg::Map(index));
        }
        for binding in buffers {
            launch.buffers.push(resource(launch.buffers.len(), binding)?);
        }
        let mut dynamic: Vec<u64> = info.data.get(info.dynamic_metadata_offset..).unwrap_or_default().to_vec();
        if !dynamic.is_empty() {
            // SAFETY: `dynamic` outlives the run.
            launch.buffers.push(unsafe { Buffer::new(dynamic.as_mut_ptr().cast(), dynamic.len() * 8) });
        }
        launch.args.extend((0..launch.buffers.len()).map(Arg::Buffer));
        launch.args.push(Arg::Bytes(info.data.iter().flat_map(|word| word.to_le_bytes()).collect()));
        // A kernel that does not read the info has no parameter for it.
        launch.args.truncate(self.kernel.parameters().len());
        self.kernel.run(&launch).map(drop).map_err(|error| error.to_string())
    }
}

/// The runtime rounds allocations up, so a kernel may read the whole last word.
fn buffer(resource: OfflineResource) -> Buffer {
    let len = resource.len.next_multiple_of(4);
    // SAFETY: the server's memory lives, and only this thread uses it, while a kernel runs.
    // Allocations are rounded up to their alignment.
    unsafe { Buffer::new(resource.ptr, len) }
}

fn tensor_map(map: &TensorMapMeta, buffer: usize) -> Result<TensorMap, String> {
    let TensorMapFormat::Tiled(TiledArgs { tile_size }) = &map.format else {
        return Err(format!("tensor maps of {:?} are not modelled", map.format));
    };
    if map.interleave != TensorMapInterleave::None || map.elem_stride.iter().any(|stride| *stride != 1) {
        return Err("tensor maps with interleave or element strides are not modelled".into());
    }
    let element = map.storage_ty.size();
    let swizzle = match map.swizzle {
        TensorMapSwizzle::None => 0,
        TensorMapSwizzle::B32 => 32,
        TensorMapSwizzle::B64 => 64,
        TensorMapSwizzle::B128 => 128,
        other => return Err(format!("the swizzle {other:?} is not modelled")),
    };
    let float = match map.storage_ty {
        StorageType::Scalar(ElemType::Float(FloatKind::F16)) => Some(TensorFloat::F16),
        StorageType::Scalar(ElemType::Float(FloatKind::BF16)) => Some(TensorFloat::Bf16),
        StorageType::Scalar(ElemType::Float(FloatKind::F32)) => Some(TensorFloat::F32),
        _ => None,
    };
    let (shape, strides) = (map.metadata.shape(), map.metadata.strides());
    Ok(TensorMap {
        buffer,
        dims: shape.iter().rev().map(|dim| *dim as u64).collect(),
        strides: strides.iter().rev().skip(1).map(|stride| (*stride * element) as u64).collect(),
        tile: tile_size.iter().rev().map(|dim| *dim as u32).collect(),
        element,
        float,
        swizzle,
        nan_fill: map.oob_fill == OobFill::NaN,
    })
}
