//! Tensor maps and the bytes that their copies move, as in the driver API's
//! `cuTensorMapEncodeTiled` and the PTX ISA. Boxes are clipped at the tensor's edges. In shared
//! memory a box is dense, with 16-byte chunks permuted by address.

use half::{bf16, f16};

use super::memory::Buffer;
use super::operand::ElementType;

/// Tiled tensor map; dimensions are innermost first.
#[derive(Clone, Debug)]
pub struct TensorMap {
    /// Index of the buffer.
    pub buffer: usize,
    /// Size of each dimension in elements.
    pub dims: Vec<u64>,
    /// Bytes between elements of each dimension except the innermost.
    pub strides: Vec<u64>,
    /// Size of a box in elements.
    pub tile: Vec<u32>,
    /// Bytes of an element.
    pub element: usize,
    /// Floating-point type of the elements for reductions; None for integers.
    pub float: Option<TensorFloat>,
    /// Swizzle in bytes: 0, 32, 64 or 128.
    pub swizzle: usize,
    /// Elements outside of the tensor are NaN instead of 0.
    pub nan_fill: bool,
}

/// Floating-point type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorFloat {
    /// 16 bits.
    F16,
    /// 16 bits.
    Bf16,
    /// 32 bits.
    F32,
}

impl TensorMap {
    /// # Errors
    /// For parameters that `cuTensorMapEncodeTiled` rejects or that are not modelled.
    pub(crate) fn check(&self, buffers: &[Buffer]) -> Result<(), String> {
        let rank = self.dims.len();
        let require = |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("{what}: {self:?}")) };
        require((1..=5).contains(&rank), "a tensor map has 1 to 5 dimensions")?;
        require(self.strides.len() + 1 == rank && self.tile.len() == rank, "a tensor map's lengths differ")?;
        let address = buffers.get(self.buffer).ok_or("no such buffer")?.address(self.buffer);
        require(address.is_multiple_of(16), "a tensor map's memory is aligned to 16 bytes")?;
        require(self.dims.iter().all(|dim| (1..=1 << 32).contains(dim)), "a tensor map's dimensions are 1 to 2^32")?;
        let fits = |stride: &u64| stride.is_multiple_of(16) && *stride < 1 << 40;
        require(self.strides.iter().all(fits), "a tensor map's strides are multiples of 16 bytes")?;
        require(self.tile.iter().all(|tile| (1..=256).contains(tile)), "a box has 1 to 256 elements each way")?;
        let row = self.row_bytes();
        require(row.is_multiple_of(16), "a row of a box is a multiple of 16 bytes")?;
        require(self.swizzle == 0 || row <= self.swizzle, "a row of a box is at most the swizzle")?;
        require(self.swizzle == 0 || row == self.swizzle, "a row shorter than the swizzle is not modelled")
    }

    /// Bytes of one row of a box.
    pub(crate) fn row_bytes(&self) -> usize {
        self.tile[0] as usize * self.element
    }

    /// Bytes of a box, which a load reports to its mbarrier whether clipped or not.
    pub(crate) fn box_bytes(&self) -> usize {
        self.tile.iter().product::<u32>() as usize * self.element
    }

    /// For each row of the box at `coords`: its offset from the tensor's first element, and the
    /// byte range inside the tensor. None for a row outside.
    pub(crate) fn rows(&self, coords: &[i32]) -> Vec<Option<(i64, std::ops::Range<usize>)>> {
        let count: usize = self.tile[1..].iter().product::<u32>() as usize;
        let inner = i64::from(coords[0]);
        let first = (-inner).clamp(0, i64::from(self.tile[0]));
        let last = (self.dims[0] as i64 - inner).clamp(first, i64::from(self.tile[0]));
        let element = self.element as i64;
        let range = (first * element) as usize..(last * element) as usize;
        (0..count)
            .map(|row| {
                let mut rest = row;
                let mut offset = inner * element;
                let outer = self.tile.iter().zip(coords).zip(&self.dims).skip(1).zip(&self.strides);
                for (((tile, coord), dim), stride) in outer {
                    let at = i64::from(*coord) + (rest % *tile as usize) as i64;
                    rest /= *tile as usize;
                    if at < 0 || at >= *dim as i64 {
                        return None;
                    }
                    offset += at * *stride as i64;
                }
                (!range.is_empty()).then(|| (offset, range.clone()))
            })
            .collect()
    }

    /// Fill byte of elements outside of the tensor.
    pub(crate) fn fill(&self) -> u8 {
        if self.nan_fill { 0xff } else { 0 }
    }
}

/// Shared address of byte `address` of an unswizzled box. Chunks of 16 bytes are permuted within
/// `swizzle` bytes by the higher address bits, which number the row of 128 bytes.
pub(crate) fn swizzled(address: usize, swizzle: usize) -> usize {
    let chunks = match swizzle {
        128 => 7,
        64 => 3,
        32 => 1,
        _ => 0,
    };
    address ^ (address >> 7 & chunks) << 4
}

/// Adds the elements of row `source` to row `target`.
pub(crate) fn add(target: &mut [u8], source: &[u8], float: Option<TensorFloat>, element: usize) {
    for (target, source) in target.chunks_exact_mut(element).zip(source.chunks_exact(element)) {
        let word = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        match float {
            Some(TensorFloat::F32) => {
                let value = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let sum = value(target) + value(source);
                target.copy_from_slice(&sum.to_le_bytes());
            }
            Some(TensorFloat::F16) => {
                let sum = f16::from_bits(word(target)).to_f32() + f16::from_bits(word(source)).to_f32();
                target.copy_from_slice(&f16::from_f32(sum).to_bits().to_le_bytes());
            }
            Some(TensorFloat::Bf16) => {
                let sum = bf16::from_bits(word(target)).to_f32() + bf16::from_bits(word(source)).to_f32();
                target.copy_from_slice(&bf16::from_f32(sum).to_bits().to_le_bytes());
            }
            None => {
                let mut carry = 0;
                for (target, source) in target.iter_mut().zip(source) {
                    carry += u16::from(*target) + u16::from(*source);
                    *target = carry as u8;
                    carry >>= 8;
                }
            }
        }
    }
}

/// Value of an element's bits.
pub(crate) fn element(bits: &[u8], ty: ElementType) -> f32 {
    match ty {
        ElementType::E4m3 => super::convert::e4m3(bits[0]),
        ElementType::E5m2 => super::convert::e5m2(bits[0]),
        ElementType::F16 => f16::from_bits(u16::from_le_bytes([bits[0], bits[1]])).to_f32(),
        ElementType::Bf16 => bf16::from_bits(u16::from_le_bytes([bits[0], bits[1]])).to_f32(),
        ElementType::F32 => f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]),
        ElementType::Tf32 => f32::from_le_bytes([0, bits[1] & 0xe0, bits[2], bits[3]]),
    }
}
