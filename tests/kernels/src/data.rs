//! Reproducible contents of matrices: ordinary values, and values that casts and sums may get
//! wrong.

use cubecl::ir::{ElemType, FloatKind, StorageType};
use float8_kernels::check::{floats, in_dtype};
use test_data::normal;
pub(crate) use test_data::{Random, same, transpose};

/// `f32`
pub const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
/// `f16`
pub const F16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F16));
/// `bf16`
pub const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
/// Dtypes of tensors that can be cast.
pub const DTYPES: [StorageType; 3] = [F32, F16, BF16];

/// Content of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Values over many binades.
    Values,
    /// [`Values`](Self::Values), with one in fifty a zero, subnormal, very small or large value,
    /// infinity or NaN.
    Spiced,
    /// [`Spiced`](Self::Spiced) with finite magnitudes of at most 1e18, whose squares fit in f32.
    Mild,
    /// Zeros of both signs.
    Zeros,
    /// Subnormals of the dtype.
    Subnormals,
    /// Zeros and one smallest subnormal of the dtype.
    Least,
    /// Uniform up to nearly the largest value of the dtype.
    Huge,
    /// Multiples of 1/16 with amax 448, half of them halfway between two codes of e4m3.
    Ties,
    /// Values with one NaN.
    OneNan,
    /// Values with one infinity.
    OneInf,
    /// Values whose first element is an infinity and whose last is a NaN.
    Ends,
    /// Values with one larger element in each row: the first, the last or the middle one.
    Peaks,
    /// Rows that each repeat 0, -0, the smallest subnormal, -1e-40, 1e-30 or -1.
    Constants,
    /// Normal distribution with a standard deviation of 1.
    Normal,
    /// Random bits of finite, non-negative f32.
    Bits,
}

impl Content {
    /// Contents that distinguish casts for any dtype and shape.
    pub(crate) const ALL: [Content; 10] = [
        Content::Values,
        Content::Spiced,
        Content::Zeros,
        Content::Subnormals,
        Content::Least,
        Content::Huge,
        Content::Ties,
        Content::OneNan,
        Content::OneInf,
        Content::Ends,
    ];

    /// Row-major elements for a matrix of `dtype`, not yet rounded to it.
    pub(crate) fn fill(self, [rows, cols]: [usize; 2], dtype: StorageType, seed: u64) -> Vec<f32> {
        const CONSTANTS: [f32; 6] = [0.0, -0.0, f32::from_bits(1), -1e-40, 1e-30, -1.0];
        // Magnitudes of subnormals and of huge values, and the smallest subnormal. `powi` may give zero.
        let [tiny, huge, least] = match dtype {
            F16 => [2f32.powi(-15), 6e4, 2f32.powi(-24)],
            BF16 => [2f32.powi(-127), 3e38, f32::from_bits(1 << 16)],
            _ => [2f32.powi(-127), 3e38, f32::from_bits(1)],
        };
        let len = rows * cols;
        let mut random = Random::new(seed);
        let random = &mut random;
        let mut x: Vec<f32> = match self {
            Content::Spiced | Content::Mild => random.spiced(len, 50),
            Content::Normal => normal(len, seed),
            _ => (0..len)
                .map(|i| match self {
                    Content::Zeros | Content::Least => 0f32.copysign(random.unit()),
                    Content::Subnormals => tiny * random.unit(),
                    Content::Huge => huge * random.unit(),
                    Content::Ties => (random.below(512) as f32 - 256.0) / 16.0 * (random.below(8) as f32 - 6.0).exp2(),
                    Content::Constants => CONSTANTS[i / cols % 6],
                    Content::Bits => f32::from_bits(random.bits() % 0x7f80_0000),
                    _ => random.value(),
                })
                .collect(),
        };
        let place = random.below(len);
        match self {
            Content::OneNan => x[place] = f32::NAN,
            Content::OneInf => x[place] = f32::NEG_INFINITY,
            Content::Ties => x[place] = -448.0,
            Content::Least => x[place] = -least,
            Content::Ends => {
                x[0] = f32::NEG_INFINITY;
                x[len - 1] = -f32::NAN;
            }
            Content::Peaks => {
                for (r, row) in x.chunks_exact_mut(cols).enumerate() {
                    row[[0, cols - 1, cols / 2][r % 3]] = -100.0 - r as f32;
                }
            }
            Content::Mild => {
                let large = x.iter_mut().filter(|x| x.is_finite() && x.abs() > 1e18);
                large.for_each(|x| *x = 1e18f32.copysign(*x));
            }
            _ => {}
        }
        x
    }
}

/// Rounds `x` to a dtype of [`DTYPES`]. Returns the bytes and the rounded values in f32.
pub(crate) fn to_dtype(x: &[f32], dtype: StorageType) -> (Vec<u8>, Vec<f32>) {
    in_dtype(x, dtype).expect("a dtype of tensors")
}

/// Values of bytes in a dtype of [`DTYPES`].
pub(crate) fn from_dtype(bytes: &[u8], dtype: StorageType) -> Vec<f32> {
    floats(bytes, dtype).expect("a dtype of tensors")
}
