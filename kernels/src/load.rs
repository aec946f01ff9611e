//! Loads of elements of any dtype as raw bits, never past the end of a view.
//!
//! Elements are read as `u32` words and widened to f32 by integer arithmetic. So every device can
//! read f16 and bf16, and none flushes subnormals.

use cubecl::prelude::*;

use crate::element_type::ElementType;
use crate::ptx::cvt::{Isa, cvt_f32_f16};
use crate::ptx::memory::{load_global, pin};

/// Dimensions, strides and offset of a checked view on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    row_stride: u32,
    col_stride: u32,
    base: u32,
}

#[cube]
impl Geometry {
    /// Index of an element.
    pub(crate) fn index(&self, row: u32, col: u32) -> u32 {
        self.base + row * self.row_stride + col * self.col_stride
    }

    /// The same view of later elements.
    pub(crate) fn after(&self, elements: u32) -> Geometry {
        Geometry {
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
            base: self.base + elements,
        }
    }
}

/// Position of a unit that steps through a matrix by a fixed number of pieces. All rows have the
/// same number of pieces.
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
    /// Cursor at piece `first`, with step `step`. Divides by `per_row`, which is slow, unless there
    /// is only one row. Then pieces may be past its end.
    pub(crate) fn new(first: u32, step: u32, per_row: u32, #[comptime] one_row: bool) -> Cursor {
        let (row, piece) = row_and_piece(first, per_row, one_row);
        let (row_step, piece_step) = row_and_piece(step, per_row, one_row);
        Cursor { row, piece, per_row, row_step, piece_step, one_row }
    }

    /// Advances by one step.
    pub(crate) fn advance(&mut self) {
        self.piece += self.piece_step;
        if comptime!(!self.one_row) {
            let carry = self.piece >= self.per_row;
            self.piece -= select(carry, self.per_row, 0u32.runtime());
            self.row += self.row_step + select(carry, 1u32.runtime(), 0u32.runtime());
        }
    }
}

/// Row of piece `number`, and its piece within the row.
#[cube]
fn row_and_piece(number: u32, per_row: u32, #[comptime] one_row: bool) -> (u32, u32) {
    if comptime!(one_row) { (0u32.runtime(), number) } else { (number / per_row, number % per_row) }
}

/// Raw bits of 16 bytes of `x` from `(r, c)` on, as words `raw[first..first + 4]`. Each word has
/// one f32 or two 16-bit elements. `c` must be a multiple of [`ElementType::vector_len`].
///
/// A row or column past the end repeats the last one. So nothing outside the matrix is read, and a
/// maximum does not change. Without a branch, the loads of several calls overlap. The caller must
/// drop codes of such elements.
#[cube]
pub(crate) fn load_vector<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    r: u32,
    c: u32,
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
    let start = geometry.base + min(r, geometry.rows - 1) * geometry.row_stride;
    let width = N::value();
    if comptime!(width > 1) {
        // `has_vector_loads`: the columns are either all inside or all outside.
        let len = comptime!(element_type.vector_len());
        let index = (start + min(c, geometry.cols - len)) / len;
        load_pinned(x, index, raw, first, isa);
    } else {
        let per_word = comptime!(element_type.per_word());
        #[unroll]
        for i in 0..4u32 {
            let mut word = 0u32.runtime();
            #[unroll]
            for j in 0..per_word {
                let col = min(c + comptime!(i * per_word + j), geometry.cols - 1);
                word |= load_raw(x, start + col * geometry.col_stride, element_type) << comptime!(16 * j);
            }
            raw[comptime!((first + i) as usize)] = word;
        }
    }
}

/// Loads scalars `to[first..first + N]` from element `index` of `x`. With PTX, loads before
/// [`all_loaded`] stay before it.
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

/// Separates loads from uses of their values, so that the loads stay in flight together. All units
/// must call it.
#[cube]
pub(crate) fn all_loaded(#[comptime] isa: Isa) {
    if comptime!(isa.has_ptx()) {
        pin();
    }
}

/// Words of a 32-byte sector.
pub(crate) const SECTOR_WORDS: u32 = 8;

/// Loads 32 bytes from `(r, c)` on as words `raw[first..first + 8]`, by two [`load_vector`].
#[cube]
pub(crate) fn load_sector<N: Size>(
    x: &Array<Vector<u32, N>>,
    geometry: &Geometry,
    r: u32,
    c: u32,
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) {
    load_vector(x, geometry, r, c, raw, first, element_type, isa);
    load_vector(x, geometry, r, c + comptime!(element_type.vector_len()), raw, comptime!(first + 4), element_type, isa);
}

/// Raw bits of the element at `index`, in elements from the start of the array.
#[cube]
fn load_raw<N: Size>(x: &Array<Vector<u32, N>>, index: u32, #[comptime] element_type: ElementType) -> u32 {
    if comptime!(element_type.size() == 4) {
        x[index as usize][0]
    } else {
        let word = x[(index / 2) as usize][0];
        (word >> (16u32 * (index % 2))) & 0xffffu32
    }
}

/// Element `i` of a vector, as f32.
#[cube]
pub(crate) fn load_scalar(x: &Array<u32>, geometry: &Geometry, i: u32, #[comptime] element_type: ElementType) -> f32 {
    let index = geometry.base + i * geometry.col_stride;
    let raw = if comptime!(element_type.size() == 4) {
        x[index as usize]
    } else {
        (x[(index / 2) as usize] >> (16u32 * (index % 2))) & 0xffffu32
    };
    f32::reinterpret(widen(raw, element_type))
}

/// Raw bits of |x|. In all three formats magnitudes order like their bits, with NaN above infinity.
#[cube]
pub(crate) fn magnitude(raw: u32, #[comptime] element_type: ElementType) -> u32 {
    if comptime!(element_type.size() == 4) { raw & 0x7fff_ffffu32 } else { raw & 0x7fffu32 }
}

/// Maximum of `largest` and the [`magnitude`]s of the elements in a word.
#[cube]
pub(crate) fn max_magnitude(largest: u32, word: u32, #[comptime] element_type: ElementType) -> u32 {
    if comptime!(element_type.per_word() == 1) {
        max(largest, magnitude(word, element_type))
    } else {
        max(max(largest, magnitude(word, element_type)), magnitude(word >> 16u32, element_type))
    }
}

/// f32 bits of an element. Exact for every value.
#[cube]
pub(crate) fn widen(raw: u32, #[comptime] element_type: ElementType) -> u32 {
    if comptime!(element_type == ElementType::F32) {
        raw
    } else if comptime!(element_type == ElementType::Bf16) {
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

/// f32 bits of element `j` in the words `raw[first..]`. A NaN may lose its sign.
#[cube]
pub(crate) fn element(
    raw: &Array<u32>,
    #[comptime] first: u32,
    #[comptime] j: u32,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
) -> u32 {
    if comptime!(element_type == ElementType::F32) {
        raw[comptime!((first + j) as usize)]
    } else {
        let word = raw[comptime!((first + j / 2) as usize)];
        let upper = comptime!(j % 2 == 1);
        if comptime!(element_type == ElementType::Bf16 && upper) {
            word & 0xffff_0000u32
        } else if comptime!(element_type == ElementType::Bf16) {
            word << 16u32
        } else if comptime!(isa.has_ptx()) {
            u32::reinterpret(cvt_f32_f16(word, upper))
        } else if comptime!(upper) {
            widen(word >> 16u32, element_type)
        } else {
            widen(word & 0xffffu32, element_type)
        }
    }
}
