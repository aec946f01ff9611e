//! FP8 matrices on the host, and operands made from them or read back.

use core::fmt;

use cubecl::prelude::*;
use float8_kernels::check::upload_operand;
use float8_kernels::mx::{from_blocked, to_blocked};
use float8_kernels::reference::{self, HostOperand, HostQuantized, amax_to_scale, decode, encode, quantize};
use float8_kernels::{Cast, Format, Granularity, InvScale, Operand, ScaleCalculationMode, ScaleMode, row_words};

use crate::Failure;
use crate::case::{kebab, wrong};
use crate::data::Random;
use crate::device::{must_be, read, read_f32};

/// Granularity of E8M0 scales.
pub const MX: Granularity = Granularity::Block1x32;

/// Scale modes of a granularity, the default first.
pub(crate) const fn modes(granularity: Granularity) -> &'static [ScaleMode] {
    match granularity {
        MX => &[
            ScaleMode::E8m0(ScaleCalculationMode::Rceil),
            ScaleMode::E8m0(ScaleCalculationMode::Floor),
            ScaleMode::E8m0(ScaleCalculationMode::Ceil),
            ScaleMode::E8m0(ScaleCalculationMode::Even),
            ScaleMode::E8m0Square(ScaleCalculationMode::Rceil),
        ],
        _ => &[ScaleMode::F32, ScaleMode::PowerOfTwo],
    }
}

/// A contraction-major `[rows, k]` matrix: an [`Operand`] without padding.
#[derive(Clone, Debug)]
pub struct HostMatrix {
    /// Codes, row-major.
    pub codes: Vec<u8>,
    /// Inverse scales, row-major, with the dimensions of [`Granularity::scale_dims`].
    pub inv_scales: Vec<InvScale>,
    /// Rows, and length of the contraction.
    pub shape: [usize; 2],
    /// Format of the codes.
    pub format: Format,
    /// Groups of elements that share a scale.
    pub granularity: Granularity,
}

/// Kind of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Any finite values, so sums cancel, with scales over some binades.
    Random,
    /// [`Random`](Codes::Random) with power-of-two scales.
    PowersOfTwo,
    /// -1, 0 and 1 with scales of 1/2, 1 and 2. Every partial sum is exact on every path, so every
    /// bit must be right.
    Exact,
    /// Zeros of both signs.
    Zeros,
    /// [`Random`](Codes::Random) with one NaN.
    NanCode,
    /// [`Random`](Codes::Random) with one infinity (of e5m2; e4m3 has none).
    InfCode,
    /// [`Zeros`](Codes::Zeros) with NaN as the last scale.
    NanScale,
    /// Every code of the left operand, each multiplied by one and nothing else. Its value must be
    /// right bit for bit.
    EachLeft,
    /// Every code of the right operand, as in [`EachLeft`](Codes::EachLeft).
    EachRight,
}

impl Codes {
    /// Whether every bit of a product must be right.
    pub(crate) const fn is_exact(self) -> bool {
        matches!(self, Codes::Exact | Codes::EachLeft | Codes::EachRight)
    }

    /// Code of the NaN or the infinity among the codes.
    pub(crate) const fn special(self, format: Format) -> Option<u8> {
        match (self, format) {
            (Codes::NanCode, _) => Some(0xff),
            (Codes::InfCode, Format::E5m2) => Some(0xfc),
            _ => None,
        }
    }
}

impl fmt::Display for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&kebab(self))
    }
}

impl HostMatrix {
    /// Creates a matrix with this kind of codes and scales.
    pub fn new(codes: Codes, shape: [usize; 2], format: Format, granularity: Granularity, seed: u64) -> Self {
        let [rows, k] = shape;
        let mut random = Random::new(seed);
        let one = encode(1.0, format);
        let code = |random: &mut Random| match codes {
            Codes::Exact => [one, 0, one | 0x80][random.below(3)],
            Codes::Zeros | Codes::NanScale => [0, 0x80][random.below(2)],
            _ => encode(random.value(), format),
        };
        let mut bytes: Vec<u8> = (0..rows * k).map(|_| code(&mut random)).collect();
        let [height, width] = granularity.scale_dims(rows, k);
        let scale = |random: &mut Random| match codes {
            Codes::Exact => [0.5, 1.0, 2.0][random.below(3)],
            _ => {
                let scale = random.value().abs() * 0.01 + 1e-5;
                let round = granularity == MX || codes == Codes::PowersOfTwo;
                if round { f32::from_bits(scale.to_bits() & 0x7f80_0000) } else { scale }
            }
        };
        let mut inv_scales: Vec<_> = (0..height * width).map(|_| InvScale::new(scale(&mut random))).collect();
        if let Some(code) = codes.special(format) {
            bytes[random.below(rows * k)] = code;
        }
        if codes == Codes::NanScale {
            inv_scales[height * width - 1] = InvScale::new(f32::NAN);
        }
        Self { codes: bytes, inv_scales, shape, format, granularity }
    }

    /// Codes and scales of `x [rows, k]` by the scalar reference.
    pub fn cast(x: &[f32], shape @ [rows, k]: [usize; 2], cast: Cast) -> Self {
        let HostQuantized { codes, scales, .. } = quantize(x, rows, k, cast, false);
        let inv_scales = scales.iter().map(|scale| scale.inverse()).collect();
        Self { codes, inv_scales, shape, format: cast.format, granularity: cast.granularity }
    }

    /// [`cast`](Self::cast) with the scale of a given amax.
    pub fn cast_by(amax: f32, x: &[f32], shape: [usize; 2], cast: Cast) -> Self {
        let Cast { format, granularity, scale_mode } = cast;
        let scale = amax_to_scale(amax, format, scale_mode);
        let mut codes = vec![0; x.len()];
        reference::cast(x, scale, format, &mut codes);
        Self { codes, inv_scales: vec![scale.inverse()], shape, format, granularity }
    }

    /// Every code with scales of 1. Finite codes are in the first `width` columns; each other code
    /// has its own row.
    pub(crate) fn every_code(
        shape @ [rows, k]: [usize; 2],
        width: usize,
        format: Format,
        granularity: Granularity,
    ) -> Self {
        let mut one = Self::identity(shape, format, granularity);
        let (finite, other): (Vec<u8>, Vec<u8>) = (0..=255).partition(|&code| decode(code, format).is_finite());
        let plain = rows - other.len();
        assert!(width <= k && plain * width >= finite.len(), "{rows} rows of {width} have no room for every code");
        one.codes.fill(0);
        for (i, &code) in finite.iter().cycle().take(plain * width).enumerate() {
            one.codes[i / width * k + i % width] = code;
        }
        for (i, code) in other.into_iter().enumerate() {
            one.codes[(plain + i) * k + i] = code;
        }
        one
    }

    /// Ones on the diagonal, with scales of 1.
    pub fn identity(shape @ [rows, k]: [usize; 2], format: Format, granularity: Granularity) -> Self {
        let [height, width] = granularity.scale_dims(rows, k);
        let mut codes = vec![0; rows * k];
        codes.iter_mut().step_by(k + 1).for_each(|code| *code = encode(1.0, format));
        Self { codes, inv_scales: vec![InvScale::new(1.0); height * width], shape, format, granularity }
    }

    /// This matrix with the sign bits of its codes cleared.
    pub(crate) fn magnitudes(&self) -> Self {
        Self { codes: self.codes.iter().map(|code| code & 0x7f).collect(), ..self.clone() }
    }

    /// The matrix as an operand of the scalar reference.
    pub fn view(&self) -> HostOperand<'_> {
        let Self { codes, inv_scales, shape: [rows, k], format, granularity } = self;
        HostOperand { codes, rows: *rows, k: *k, format: *format, granularity: *granularity, inv_scales }
    }

    /// `value(code) · inv_scale` of each code.
    pub fn values(&self) -> Vec<f32> {
        let k = self.shape[1];
        let value = |(i, code): (usize, &u8)| decode(*code, self.format) * self.view().inv_scale(i / k, i % k);
        self.codes.iter().enumerate().map(value).collect()
    }

    /// Checks that all codes and scales equal `want`, bit for bit; NaN equals NaN.
    ///
    /// # Errors
    /// The first difference.
    pub fn must_be(&self, want: &Self) -> Result<(), Failure> {
        if (self.shape, self.format, self.granularity) != (want.shape, want.format, want.granularity) {
            return Err(wrong!("{:?} {} {}", self.shape, self.format, self.granularity));
        }
        let scales = |matrix: &Self| matrix.inv_scales.iter().map(|scale| scale.get()).collect::<Vec<_>>();
        let [_, width] = want.granularity.scale_dims(want.shape[0], want.shape[1]);
        must_be(&scales(self), &scales(want), width).map_err(|failure| wrong!("inverse scale {failure}"))?;
        let codes = |matrix: &Self| matrix.codes.iter().map(|code| f32::from(*code)).collect::<Vec<_>>();
        must_be(&codes(self), &codes(want), want.shape[1]).map_err(|failure| wrong!("code {failure}"))
    }

    /// Uploads the operand to a device.
    pub fn upload<R: Runtime>(&self, client: &ComputeClient<R>) -> Operand {
        upload_operand(client, &self.view(), self.inv_scales.iter().all(|scale| scale.to_e8m0().is_some()))
    }

    /// Reads an operand back. Its padding must be zero codes.
    pub(crate) fn read<R: Runtime>(client: &ComputeClient<R>, operand: &Operand) -> Result<Self, Failure> {
        let &Operand { rows, k, format, granularity, .. } = operand;
        let bytes = read(client, operand.codes.clone())?;
        let pitch = row_words(k) * 4;
        if bytes.len() != rows * pitch {
            return Err(wrong!("[{rows}, {k}] has {} bytes of codes, not {}", bytes.len(), rows * pitch));
        }
        let mut codes = Vec::with_capacity(rows * k);
        for (r, row) in bytes.chunks_exact(pitch).enumerate() {
            codes.extend_from_slice(&row[..k]);
            if let Some(place) = row[k..].iter().position(|&code| code != 0) {
                return Err(wrong!("padding code [{r}, {}] of [{rows}, {k}] is {:#x}", k + place, row[k + place]));
            }
        }
        let inv_scales: Vec<_> = if granularity == MX {
            let tiles = read(client, operand.inv_scale.clone())?;
            let (blocks, len) = (k.div_ceil(32), granularity.scale_words(rows, k) * 4);
            if tiles.len() != len {
                return Err(wrong!("[{rows}, {k}] has {} bytes of scales, not {len}", tiles.len()));
            }
            let bytes = from_blocked(&tiles, rows, blocks);
            if to_blocked(&bytes, rows, blocks) != tiles {
                return Err(wrong!("scales of [{rows}, {k}] that do not exist are not zero"));
            }
            bytes.into_iter().map(InvScale::from_e8m0).collect()
        } else {
            read_f32(client, operand.inv_scale.clone())?.into_iter().map(InvScale::new).collect()
        };
        let [height, width] = granularity.scale_dims(rows, k);
        if inv_scales.len() != height * width {
            return Err(wrong!("[{rows}, {k}] has {} {granularity} scales", inv_scales.len()));
        }
        Ok(Self { codes, inv_scales, shape: [rows, k], format, granularity })
    }
}
