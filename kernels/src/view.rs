//! Strided views of device memory: checked on the host, read on the device as raw bits, never past the end.
//!
//! Elements are read as `u32` words and widened to f32 by integer arithmetic. So every device reads f16 and bf16, also
//! one that has neither, and none flushes a subnormal on the way.

use cubecl::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::KernelError;
use crate::ptx::cvt::Isa;
use crate::ptx::memory::{load_global, pin};

/// Strided rank-2 view of device memory: element `(r, c)` lies at `r * strides[0] + c * strides[1]`, in elements.
#[derive(Clone, Debug)]
pub struct MatrixView {
    /// Memory; its offset is element `(0, 0)`.
    pub handle: Handle,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Elements between rows and between columns; zero repeats.
    pub strides: [usize; 2],
    /// f32, f16 or bf16.
    pub dtype: StorageType,
}

/// Strided rank-1 view of device memory: element `i` lies at `i * stride`, in elements.
#[derive(Clone, Debug)]
pub struct VectorView {
    /// Memory; its offset is element 0.
    pub handle: Handle,
    /// Number of elements.
    pub len: usize,
    /// Elements between neighbours; zero repeats.
    pub stride: usize,
    /// f32, f16 or bf16.
    pub dtype: StorageType,
}

/// Whether tensors of `dtype` may pass through the kernels on this device: f32 always, f16 and bf16 if the client
/// reports that it stores and converts them.
///
/// This limits only what [`scaled_gemm`](crate::scaled_gemm) writes. [`amax`](crate::amax()),
/// [`quantize`](crate::quantize()), [`health`](crate::health()) and the bias read f16 and bf16 on every device.
pub fn supports<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    match Source::of(dtype) {
        Ok(Source::F32) => true,
        Ok(_) => {
            let usage = client.properties().features.type_usage(dtype);
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        }
        Err(_) => false,
    }
}

/// How the bits of an element become an f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    F32,
    F16,
    Bf16,
}

impl Source {
    pub(crate) fn of(dtype: StorageType) -> Result<Self, KernelError> {
        match dtype {
            // CubeCL stores flex32 as f32.
            StorageType::Scalar(ElemType::Float(FloatKind::F32 | FloatKind::Flex32)) => Ok(Self::F32),
            StorageType::Scalar(ElemType::Float(FloatKind::F16)) => Ok(Self::F16),
            StorageType::Scalar(ElemType::Float(FloatKind::BF16)) => Ok(Self::Bf16),
            _ => Err(KernelError::UnsupportedDtype { dtype }),
        }
    }

    /// The dtype that is stored: f32 for flex32, which not every device has under its own name.
    pub(crate) const fn storage(self) -> StorageType {
        StorageType::Scalar(ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::Bf16 => FloatKind::BF16,
        }))
    }

    pub(crate) const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Elements in a word.
    pub(crate) const fn per_word(self) -> u32 {
        4 / self.size() as u32
    }

    /// Elements in 16 bytes.
    pub(crate) const fn vector_len(self) -> u32 {
        16 / self.size() as u32
    }

    /// Elements in 32 bytes, the unit of transfer between a GPU's memory and its caches.
    pub(crate) const fn sector_len(self) -> u32 {
        2 * self.vector_len()
    }

    /// Words that hold four neighbouring elements.
    const fn quad_words(self) -> usize {
        self.size()
    }
}

/// Largest index that a kernel computes. The rest of u32 is room for the last step of a grid-stride loop.
pub const MAX_INDEX: u64 = u32::MAX as u64 - (1 << 20);

/// A checked view, ready to launch: at least one element, all of them inside the memory and reachable by u32 indices.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    handle: Handle,
    pub(crate) source: Source,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    strides: [usize; 2],
    /// Elements from the start of `handle` to element (0, 0).
    base: usize,
}

impl Checked {
    pub(crate) fn new<R: Runtime>(client: &ComputeClient<R>, x: &MatrixView) -> Result<Self, KernelError> {
        let source = Source::of(x.dtype)?;
        let ([rows, cols], strides) = (x.shape, x.strides);
        if rows == 0 || cols == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols });
        }
        // Bind from an address that every device accepts, and count the rest of the offset in elements.
        let start = x.handle.offset_start.unwrap_or(0);
        let size = source.size() as u64;
        if !start.is_multiple_of(size) {
            return Err(KernelError::Misaligned { offset: start, size: source.size() });
        }
        let aligned = start - start % client.properties().memory.alignment.max(16);
        let base = (start - aligned) / size;

        let last = ((rows - 1) as u64)
            .checked_mul(strides[0] as u64)
            .zip(((cols - 1) as u64).checked_mul(strides[1] as u64))
            .and_then(|(r, c)| r.checked_add(c));
        let elements = (rows as u64).checked_mul(cols as u64);
        let last = match (last, elements) {
            (Some(last), Some(elements)) if last.saturating_add(base) <= MAX_INDEX && elements <= MAX_INDEX => last,
            _ => return Err(KernelError::TooLarge { rows, cols, strides, limit: MAX_INDEX }),
        };
        let needed = (last + 1) * size;
        let available = x.handle.size_in_used();
        if needed > available {
            return Err(KernelError::OutOfBounds { needed, available });
        }
        let mut handle = x.handle.clone();
        handle.offset_start = (aligned != 0).then_some(aligned);
        Ok(Self { handle, source, rows, cols, strides, base: base as usize })
    }

    pub(crate) fn vector<R: Runtime>(client: &ComputeClient<R>, x: &VectorView) -> Result<Self, KernelError> {
        let view = MatrixView { handle: x.handle.clone(), shape: [1, x.len], strides: [0, x.stride], dtype: x.dtype };
        Self::new(client, &view)
    }

    /// The same memory with rows and columns exchanged.
    pub(crate) fn transpose(self) -> Self {
        let [row, col] = self.strides;
        Self { rows: self.cols, cols: self.rows, strides: [col, row], ..self }
    }

    /// Whether neighbours in memory are neighbours in a column rather than in a row: the transpose reads faster.
    pub(crate) fn is_column_major(&self) -> bool {
        let [row, col] = self.strides;
        self.rows > 1 && (self.cols == 1 || (col != 1 && (row == 1 || row < col)))
    }

    /// One long row if the rows follow each other without a gap, for kernels that do not care about the shape.
    pub(crate) fn flatten(self) -> Self {
        let [row, col] = self.strides;
        if self.rows > 1 && self.cols.checked_mul(col) == Some(row) {
            Self { rows: 1, cols: self.rows * self.cols, strides: [0, col], ..self }
        } else {
            self
        }
    }

    /// Whether every group of four columns is one aligned vector load. Ragged and gapped rows take scalar loads: a vector
    /// load at the end of the last row would leave the memory.
    pub(crate) fn has_quad_loads(&self) -> bool {
        let [row, col] = self.strides;
        col == 1
            && self.cols.is_multiple_of(4)
            && (self.rows == 1 || row.is_multiple_of(4))
            && self.base.is_multiple_of(4)
    }

    /// Whether every 16 bytes of columns are one aligned vector load, by the same reasoning.
    pub(crate) fn has_vector_loads(&self) -> bool {
        let [row, col] = self.strides;
        let aligned = |elements: usize| elements.is_multiple_of(self.source.vector_len() as usize);
        col == 1 && aligned(self.cols) && (self.rows == 1 || aligned(row)) && aligned(self.base)
    }

    /// Words in one element of the input array of a kernel that calls [`load_vector`].
    pub(crate) fn vector_words(&self) -> usize {
        if self.has_vector_loads() { 4 } else { 1 }
    }

    /// Words in one element of the input array of a kernel that calls [`load_quad`].
    pub(crate) fn load_words(&self) -> usize {
        if self.has_quad_loads() { self.source.quad_words() } else { 1 }
    }

    /// The kernel's input array.
    pub(crate) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        let [row, col] = self.strides;
        let elements = self.base + (self.rows - 1) * row + (self.cols - 1) * col + 1;
        let words = (elements * self.source.size()).div_ceil(4);
        // SAFETY: `new` has checked that all elements lie inside the handle. The last word may hold one 16-bit element
        // past the end, which stays inside the allocation: runtimes round allocations and bindings up to 4 bytes or more.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), words) }
    }

    /// The memory, and the index of the view's first element in it.
    pub(crate) fn memory(&self) -> (Handle, usize) {
        (self.handle.clone(), self.base)
    }

    /// The kernel's geometry.
    pub(crate) fn geometry<R: Runtime>(&self) -> GeometryLaunch<R> {
        GeometryLaunch::new(
            self.rows as u32,
            self.cols as u32,
            self.strides[0] as u32,
            self.strides[1] as u32,
            self.base as u32,
        )
    }
}

/// A checked view's numbers on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    row_stride: u32,
    col_stride: u32,
    base: u32,
}

/// Where a unit is in a matrix whose rows have the same number of pieces, while it goes on by the same number of them.
#[derive(CubeType)]
pub(crate) struct Cursor {
    pub(crate) row: u32,
    pub(crate) piece: u32,
    per_row: u32,
    row_step: u32,
    piece_step: u32,
    #[cube(comptime)]
    one_row: bool,
}

#[cube]
impl Cursor {
    /// At piece `first` of all, to go on by `step`. Divides by `per_row`, which takes long, unless there is but one row; there
    /// pieces may come to lie past its end.
    pub(crate) fn new(first: u32, step: u32, per_row: u32, #[comptime] one_row: bool) -> Cursor {
        if comptime!(one_row) {
            let zero = 0u32.runtime();
            Cursor { row: zero, piece: first, per_row, row_step: zero, piece_step: step, one_row }
        } else {
            Cursor {
                row: first / per_row,
                piece: first % per_row,
                per_row,
                row_step: step / per_row,
                piece_step: step % per_row,
                one_row,
            }
        }
    }

    /// Goes on by one step.
    pub(crate) fn advance(&mut self) {
        self.piece += self.piece_step;
        if comptime!(!self.one_row) {
            let carry = self.piece >= self.per_row;
            self.piece -= select(carry, self.per_row, 0u32.runtime());
            self.row += self.row_step + select(carry, 1u32.runtime(), 0u32.runtime());
        }
    }
}

/// Raw bits of elements `(r, c)` to `(r, c + 3)`, zero outside the matrix. `c` must be a multiple of 4.
#[cube]
pub(crate) fn load_quad<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    r: u32,
    c: u32,
    #[comptime] source: Source,
) -> Array<u32> {
    // Outside the matrix the first element is read and dropped: branches would keep loads from overlapping, and so many of
    // them run the compiler out of barrier registers.
    let mut raw = Array::<u32>::new(4usize);
    let start = geometry.base + r * geometry.row_stride + c * geometry.col_stride;
    let width = N::value();
    if comptime!(width > 1) {
        // `has_quad_loads`: the four columns are all inside or all outside.
        let inside = r < geometry.rows && c < geometry.cols;
        let words = x[(select(inside, start, geometry.base) / 4) as usize];
        #[unroll]
        for i in 0..4usize {
            let bits = if comptime!(source.size() == 4) {
                words[i]
            } else {
                (words[i / 2] >> comptime!(16 * (i as u32 % 2))) & 0xffffu32
            };
            raw[i] = select(inside, bits, 0u32.runtime());
        }
    } else {
        #[unroll]
        for i in 0..4u32 {
            let inside = r < geometry.rows && c + i < geometry.cols;
            let index = select(inside, start + i * geometry.col_stride, geometry.base);
            raw[i as usize] = select(inside, load_raw(x, index, source), 0u32.runtime());
        }
    }
    raw
}

/// Raw bits of the 16 bytes of `x` from `(r, c)` on as words `raw[first..first + 4]`, each of one f32 or of two 16-bit
/// elements. `c` must be a multiple of [`Source::vector_len`].
///
/// A row or column past the last one repeats the last: nothing outside the matrix is read, a maximum does not change by
/// what is repeated, and without a branch the loads of several calls overlap. Codes of such elements are for the caller to
/// drop.
#[cube]
pub(crate) fn load_vector<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    r: u32,
    c: u32,
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    let start = geometry.base + min(r, geometry.rows - 1) * geometry.row_stride;
    let width = N::value();
    if comptime!(width > 1) {
        // `has_vector_loads`: the columns are all inside or all outside.
        let len = comptime!(source.vector_len());
        let index = (start + min(c, geometry.cols - len)) / len;
        load_pinned(x, index, raw, first, isa);
    } else {
        let per_word = comptime!(source.per_word());
        #[unroll]
        for i in 0..4u32 {
            let mut word = 0u32.runtime();
            #[unroll]
            for j in 0..per_word {
                let col = min(c + comptime!(i * per_word + j), geometry.cols - 1);
                word |= load_raw(x, start + col * geometry.col_stride, source) << comptime!(16 * j);
            }
            raw[comptime!((first + i) as usize)] = word;
        }
    }
}

/// Scalars `to[first..first + N]` from element `index` of `x`; with PTX, loads before [`all_loaded`] stay before it.
#[cube]
pub(crate) fn load_pinned<T: Scalar, N: Size>(
    x: &Array<Vector<T, N>>,
    index: u32,
    to: &mut Array<T>,
    #[comptime] first: u32,
    #[comptime] isa: Isa,
) {
    if comptime!(isa.has_ptx()) {
        load_global(x, index, to, first);
    } else {
        let vector = x[index as usize];
        let width = N::value();
        #[unroll]
        for i in 0..width {
            to[comptime!(first as usize + i)] = vector[i];
        }
    }
}

/// Called between loads and the use of what they load, by all units: the loads stay in flight together.
#[cube]
pub(crate) fn all_loaded(#[comptime] isa: Isa) {
    if comptime!(isa.has_ptx()) {
        pin();
    }
}

/// The 32 bytes from `(r, c)` on as words `raw[first..first + 8]`: two of [`load_vector`].
#[cube]
pub(crate) fn load_sector<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    r: u32,
    c: u32,
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    load_vector(x, geometry, r, c, raw, first, source, isa);
    load_vector(x, geometry, r, c + comptime!(source.vector_len()), raw, comptime!(first + 4), source, isa);
}

/// Raw bits of the element at `index`, in elements from the start of the array.
#[cube]
fn load_raw<N: Size>(x: &Array<Vector<u32, N>>, index: u32, #[comptime] source: Source) -> u32 {
    if comptime!(source.size() == 4) {
        x[index as usize][0]
    } else {
        let word = x[(index / 2) as usize][0];
        (word >> (16u32 * (index % 2))) & 0xffffu32
    }
}

/// Element `i` of a vector, as f32.
#[cube]
pub(crate) fn load_scalar(x: &Array<u32>, geometry: &Geometry, i: u32, #[comptime] source: Source) -> f32 {
    let index = geometry.base + i * geometry.col_stride;
    let raw = if comptime!(source.size() == 4) {
        x[index as usize]
    } else {
        (x[(index / 2) as usize] >> (16u32 * (index % 2))) & 0xffffu32
    };
    f32::reinterpret(widen(raw, source))
}

/// Raw bits of |x|: magnitudes order like their bits in all three formats, with NaN above infinity.
#[cube]
pub(crate) fn magnitude(raw: u32, #[comptime] source: Source) -> u32 {
    if comptime!(source.size() == 4) { raw & 0x7fff_ffffu32 } else { raw & 0x7fffu32 }
}

/// The largest of `largest` and the [`magnitude`]s of the elements in a word.
#[cube]
pub(crate) fn max_magnitude(largest: u32, word: u32, #[comptime] source: Source) -> u32 {
    if comptime!(source.per_word() == 1) {
        max(largest, magnitude(word, source))
    } else {
        max(max(largest, magnitude(word, source)), magnitude(word >> 16u32, source))
    }
}

/// f32 bits of an element; exact for every value.
#[cube]
pub(crate) fn widen(raw: u32, #[comptime] source: Source) -> u32 {
    if comptime!(source == Source::F32) {
        raw
    } else if comptime!(source == Source::Bf16) {
        raw << 16u32
    } else {
        let sign = (raw & 0x8000u32) << 16u32;
        let mag = raw & 0x7fffu32;
        let normal = (mag << 13u32) + comptime!((127 - 15) << 23);
        // Subnormal: mag · 2^-24, a normal f32.
        let sub = u32::reinterpret(f32::cast_from(mag) * comptime!(f32::from_bits((127 - 24) << 23)));
        let finite = select(mag < 0x400u32, sub, normal);
        let bits = select(mag >= 0x7c00u32, (mag << 13u32) | 0x7f80_0000u32, finite);
        bits | sign
    }
}
