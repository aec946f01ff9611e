//! Tensor maps of TMA GEMMs, for operands and for the tiles' destination.
//!
//! CubeCL also keeps the shape and strides of every map in device memory for kernels that use them,
//! and copies them there before each launch. These kernels do not use them. Their maps have rank 0
//! there ([`without_shape`]), so that nothing is copied. [`InsteadOfShapes`] fills the kernel's
//! parameter for the copy.

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::element_type::ElementType;
use crate::gemm::Gemm;
use crate::{Operand, row_words};

/// Bytes of a box's row, the span of its swizzle. For codes this is 128 of the contraction, the
/// length that promotion counts.
pub(crate) const ROW_BYTES: usize = 128;

/// Number of SMs. Always known on CUDA; the fallback is the H200's.
pub(crate) fn sms<R: Runtime>(client: &ComputeClient<R>) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize
}

/// Removes the map's shape on the CubeCL side. TMA's shape stays.
pub(crate) fn without_shape<R: Runtime>(map: TensorMapArg<R, Tiled>, handle: &Handle) -> TensorMapArg<R, Tiled> {
    let (strides, shape): ([usize; 0], [usize; 0]) = ([], []);
    // SAFETY: no kernel reads through it.
    let tensor = unsafe { TensorArg::from_raw_parts(handle.clone(), strides.into(), shape.into()) };
    TensorMapArg { tensor, ..map }
}

/// Array argument that is a parameter of the kernel but no variable. It fills the pointer to shapes
/// of maps and must be the last array in the kernel's signature. Like every array, and unlike a
/// map, it orders the launch after other streams' writes to it.
pub(crate) struct InsteadOfShapes;

impl CubeType for InsteadOfShapes {
    type ExpandType = ();
}

impl LaunchArg for InsteadOfShapes {
    type RuntimeArg<R: Runtime> = ArrayArg<R>;
    type CompilationArg = ();

    fn register<R: Runtime>(array: ArrayArg<R>, launcher: &mut KernelLauncher<R>) {
        let word = launcher.with_scope(|scope| u32::as_type(scope));
        launcher.register_array(array, word);
    }

    fn expand((): &(), _: &mut KernelBuilder) {}
}

/// Matrix of bytes that TMA reads. Its rows are contiguous.
#[derive(Clone, Debug)]
pub(in crate::gemm) struct Matrix {
    pub(in crate::gemm) handle: Handle,
    pub(in crate::gemm) rows: usize,
    /// Bytes of a row.
    pub(in crate::gemm) width: usize,
    /// Bytes from one row to the next, a multiple of 16.
    pub(in crate::gemm) pitch: usize,
}

impl Matrix {
    /// Codes of a checked operand.
    pub(in crate::gemm) fn codes(operand: &Operand) -> Self {
        let width = row_words(operand.k) * 4;
        Self { handle: operand.codes.clone(), rows: operand.rows, width, pitch: width }
    }

    /// Kernel argument that represents the memory without reading it.
    pub(in crate::gemm) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: the memory has more words than rows.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.rows) }
    }

    /// Boxes of `rows` rows of [`ROW_BYTES`].
    pub(in crate::gemm) fn map<R: Runtime>(&self, rows: usize) -> TensorMapArg<R, Tiled> {
        let dtype = StorageType::Scalar(ElemType::UInt(UIntKind::U8));
        let (strides, shape) = ([self.pitch, 1], [self.rows, self.width]);
        // SAFETY: the memory has this many bytes.
        let bytes = unsafe { TensorArg::from_raw_parts(self.handle.clone(), strides.into(), shape.into()) };
        let map = TensorMapArg::new(TiledArgs { tile_size: [rows, ROW_BYTES].into() }, bytes, dtype)
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256);
        without_shape(map, &self.handle)
    }
}

/// Destination of the tiles: memory of `[matrices, rows, pitch]`.
pub(in crate::gemm) struct Target {
    handle: Handle,
    matrices: usize,
    rows: usize,
    pub(in crate::gemm) pitch: usize,
    pub(in crate::gemm) dtype: StorageType,
    pub(in crate::gemm) tma_store: bool,
}

impl Target {
    /// The output.
    pub(in crate::gemm) fn output(gemm: &Gemm) -> Self {
        let (m, n, matrices) = gemm.matrices();
        let tma_store = (n * gemm.dtype.size()).is_multiple_of(16);
        Self { handle: gemm.out.clone(), matrices, rows: m, pitch: n, dtype: gemm.dtype, tma_store }
    }

    /// Workspace for the unscaled f32 sums of `splits` splits of the contraction, `rows` rows each.
    pub(in crate::gemm) fn partials<R: Runtime>(
        client: &ComputeClient<R>,
        gemm: &Gemm,
        splits: usize,
        rows: usize,
    ) -> Self {
        let (rows, pitch) = (splits * rows, gemm.b.rows.next_multiple_of(4));
        let (handle, dtype) = (client.empty(rows * pitch * 4), ElementType::F32.storage());
        Self { handle, matrices: 1, rows, pitch, dtype, tma_store: true }
    }

    /// The memory as an array, for threads that store to it.
    pub(in crate::gemm) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: the memory has this many elements.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.matrices * self.rows * self.pitch) }
    }

    /// Boxes of `rows` rows of 128 bytes of one matrix.
    pub(in crate::gemm) fn map<R: Runtime>(&self, rows: usize) -> TensorMapArg<R, Tiled> {
        let (pitch, cols) = (self.pitch, ROW_BYTES / self.dtype.size());
        let (strides, shape) = ([self.rows * pitch, pitch, 1], [self.matrices, self.rows, pitch]);
        // SAFETY: the memory has this many elements.
        let out = unsafe { TensorArg::from_raw_parts(self.handle.clone(), strides.into(), shape.into()) };
        let map = TensorMapArg::new(TiledArgs { tile_size: [1, rows, cols].into() }, out, self.dtype)
            .with_swizzle(TensorMapSwizzle::B128);
        without_shape(map, &self.handle)
    }
}
