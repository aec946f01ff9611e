//! All casts, and operands on the host.

use float8_kernels::reference::{HostOperand, HostQuantized, encode, quantize};
use float8_kernels::{Cast, Format, Granularity, InvScale, ScaleCalculationMode, ScaleMode};
use proptest::prelude::*;
use proptest::sample::select;
use test_data::Random;

const MODES: [ScaleMode; 2] = [ScaleMode::F32, ScaleMode::PowerOfTwo];

/// All valid combinations of format, granularity and scale mode, except E8M0 squares.
pub(crate) fn casts() -> impl Iterator<Item = Cast> {
    Format::ALL.into_iter().flat_map(|format| {
        Granularity::ALL.into_iter().flat_map(move |granularity| {
            let modes = match granularity {
                Granularity::Block1x32 => ScaleCalculationMode::ALL.map(ScaleMode::E8m0).to_vec(),
                _ => MODES.to_vec(),
            };
            modes.into_iter().map(move |scale_mode| Cast { format, granularity, scale_mode })
        })
    })
}

pub(crate) fn any_cast() -> impl Strategy<Value = Cast> {
    select(casts().collect::<Vec<_>>())
}

/// An operand on the host.
#[derive(Clone, Debug)]
pub(crate) struct HostMatrix {
    pub(crate) codes: Vec<u8>,
    pub(crate) inv_scales: Vec<InvScale>,
    pub(crate) shape: [usize; 2],
    pub(crate) format: Format,
    pub(crate) granularity: Granularity,
}

impl HostMatrix {
    /// Finite codes, so that sums cancel, and scales over some binades.
    pub(crate) fn random(shape: [usize; 2], format: Format, granularity: Granularity, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let codes = random.values(shape[0] * shape[1]).into_iter().map(|x| encode(x, format)).collect();
        let [height, width] = granularity.scale_dims(shape[0], shape[1]);
        let scale = |x: f32| InvScale::new(x.abs() * 0.01 + 1e-5);
        let inv_scales = random.values(height * width).into_iter().map(scale).collect();
        Self { codes, inv_scales, shape, format, granularity }
    }

    /// Copy by rows of `x [rows, k]`.
    pub(crate) fn cast(x: &[f32], shape @ [rows, k]: [usize; 2], cast: Cast) -> Self {
        let HostQuantized { codes, scales, .. } = quantize(x, rows, k, cast, false);
        let inv_scales = scales.iter().map(|scale| scale.inverse()).collect();
        Self { codes, inv_scales, shape, format: cast.format, granularity: cast.granularity }
    }

    pub(crate) fn view(&self) -> HostOperand<'_> {
        let Self { codes, inv_scales, shape: [rows, k], format, granularity } = self;
        HostOperand { codes, rows: *rows, k: *k, format: *format, granularity: *granularity, inv_scales }
    }
}
