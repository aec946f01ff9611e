//! Tensor maps: `cuTensorMapEncodeTiled` by the manual's rules, and the interpreter's map of the
//! 128 bytes.

use cudarc::driver::sys::CUtensorMapDataType::{self, *};
use cudarc::driver::sys::CUtensorMapInterleave::{self, *};
use cudarc::driver::sys::CUtensorMapSwizzle::{self, *};
use ptx_interpreter::{TensorFloat, TensorMap};

/// Bytes of a map.
pub const BYTES: usize = 128;

/// First bytes of a map, so that other parameters of its size are not taken for one.
const TAG: u64 = 0x70616d_726f736e;

/// Arguments of `cuTensorMapEncodeTiled`, with the innermost axis first.
pub struct Tiled {
    pub address: u64,
    pub kind: CUtensorMapDataType,
    pub dims: Vec<u64>,
    pub strides: Vec<u64>,
    pub tile: Vec<u32>,
    pub element_strides: Vec<u32>,
    pub interleave: CUtensorMapInterleave,
    pub swizzle: CUtensorMapSwizzle,
    pub nan_fill: bool,
}

impl Tiled {
    /// The map's bytes.
    ///
    /// # Errors
    /// The rule of the manual that the arguments break, or an argument that is not modelled.
    pub fn encode(&self) -> Result<[u8; BYTES], String> {
        let require = |holds: bool, rule: &str| if holds { Ok(()) } else { Err(rule.to_string()) };
        let (element, float) = element(self.kind).ok_or("an element type that is not modelled")?;
        let plain = self.interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
        require((1..=5).contains(&self.dims.len()), "the rank is 1 to 5")?;
        require(plain, "an interleave is not modelled")?;
        require(self.address.is_multiple_of(16), "the address is a multiple of 16")?;
        require(self.dims.iter().all(|dim| (1..=1 << 32).contains(dim)), "a dimension is 1 to 2^32")?;
        let fits = |stride: &u64| stride.is_multiple_of(16) && *stride < 1 << 40;
        require(self.strides.iter().all(fits), "a stride is a multiple of 16 below 2^40")?;
        require(self.tile.iter().all(|side| (1..=256).contains(side)), "a side of a box is 1 to 256")?;
        require(self.element_strides.iter().all(|stride| (1..=8).contains(stride)), "an element stride is 1 to 8")?;
        require(self.element_strides.iter().all(|stride| *stride == 1), "element strides are not modelled")?;
        let row = self.tile[0] as usize * element;
        require(row.is_multiple_of(16), "a row of a box is a multiple of 16 bytes")?;
        let swizzle = match self.swizzle {
            CU_TENSOR_MAP_SWIZZLE_NONE => 0,
            CU_TENSOR_MAP_SWIZZLE_32B => 32,
            CU_TENSOR_MAP_SWIZZLE_64B => 64,
            CU_TENSOR_MAP_SWIZZLE_128B => 128,
            _ => return Err("a swizzle that is not modelled".into()),
        };
        require(swizzle == 0 || row <= swizzle, "a row of a box is at most the swizzle")?;
        require(!self.nan_fill || float != Number::Integer, "NaN fills floats alone")?;

        let mut words = vec![TAG, self.address];
        words.push(u64::from_le_bytes([
            self.dims.len() as u8,
            element as u8,
            float as u8,
            swizzle as u8,
            u8::from(self.nan_fill),
            0,
            0,
            0,
        ]));
        words.extend(self.dims.iter().zip(&self.tile).map(|(dim, side)| (dim - 1) << 16 | u64::from(*side)));
        words.extend(&self.strides);
        words.resize(BYTES / 8, 0);
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(bytes.try_into().expect("128 bytes"))
    }
}

/// Address and map of a parameter's bytes; None if they are no map. The map is of buffer 0.
pub fn decode(bytes: &[u8]) -> Option<(u64, TensorMap)> {
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let (tag, address) = (words.next()?, words.next()?);
    if tag != TAG || bytes.len() != BYTES {
        return None;
    }
    let [rank, element, float, swizzle, nan_fill, ..] = words.next()?.to_le_bytes();
    let sides: Vec<u64> = words.by_ref().take(rank.into()).collect();
    let map = TensorMap {
        buffer: 0,
        dims: sides.iter().map(|side| (side >> 16) + 1).collect(),
        strides: words.take(usize::from(rank) - 1).collect(),
        tile: sides.iter().map(|side| (side & 0xffff) as u32).collect(),
        element: element.into(),
        float: [None, None, Some(TensorFloat::F16), Some(TensorFloat::Bf16), Some(TensorFloat::F32)]
            [usize::from(float)],
        swizzle: swizzle.into(),
        nan_fill: nan_fill != 0,
    };
    Some((address, map))
}

/// Meaning of an element.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Number {
    Integer,
    /// A float that the interpreter does not add.
    Other,
    F16,
    Bf16,
    F32,
}

/// Bytes and meaning of an element.
fn element(kind: CUtensorMapDataType) -> Option<(usize, Number)> {
    Some(match kind {
        CU_TENSOR_MAP_DATA_TYPE_UINT8 => (1, Number::Integer),
        CU_TENSOR_MAP_DATA_TYPE_UINT16 => (2, Number::Integer),
        CU_TENSOR_MAP_DATA_TYPE_UINT32 | CU_TENSOR_MAP_DATA_TYPE_INT32 => (4, Number::Integer),
        CU_TENSOR_MAP_DATA_TYPE_UINT64 | CU_TENSOR_MAP_DATA_TYPE_INT64 => (8, Number::Integer),
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16 => (2, Number::F16),
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 => (2, Number::Bf16),
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32 => (4, Number::F32),
        CU_TENSOR_MAP_DATA_TYPE_FLOAT64 => (8, Number::Other),
        _ => return None,
    })
}
