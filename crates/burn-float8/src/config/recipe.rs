//! Casts and scale rounding of each [`Recipe`].
use std::str::FromStr;

use float8_kernels::{Format, Granularity};

use super::cast::{CastConfig, Casts};
use crate::error::Float8Error;
use crate::terms::{Gemm, Operand, Recipe};

impl Recipe {
    /// Casts of the six operands.
    pub const fn casts(self) -> Casts {
        use Format::{E4m3, E5m2};
        const fn e4m3(granularity: Granularity) -> CastConfig {
            CastConfig::dynamic(granularity, E4m3)
        }
        let (tensor, row, mx) = (e4m3(Granularity::Tensor), e4m3(Granularity::Row), e4m3(Granularity::Block1x32));
        let (line, square) = (e4m3(Granularity::Block1x128), e4m3(Granularity::Block128x128));
        let history = CastConfig::delayed(E4m3);
        match self {
            Self::Tensorwise => Casts::new(tensor, tensor, CastConfig::dynamic(Granularity::Tensor, E5m2)),
            Self::Rowwise => Casts::new(row, row, row),
            Self::RowwiseWithGwHp => Casts::new(row, row, row).with(Operand::WEIGHT, tensor).without(Gemm::Wgrad),
            Self::Delayed => Casts::new(history, history, CastConfig::delayed(E5m2)),
            Self::Blockwise => Casts::new(line, square, line),
            Self::Mxfp8 => Casts::new(mx, mx, mx),
            Self::Mxfp8WgradWithHp => Casts::new(mx, mx, mx).without(Gemm::Wgrad),
        }
    }

    /// Whether f32 scales are rounded down to powers of two.
    pub const fn round_scales_to_power_of_2(self) -> bool {
        matches!(self, Self::Rowwise | Self::RowwiseWithGwHp)
    }
}

impl FromStr for Recipe {
    type Err = Float8Error;

    fn from_str(name: &str) -> Result<Self, Float8Error> {
        let found = Self::ALL.into_iter().find(|recipe| recipe.name() == name);
        found.ok_or_else(|| {
            let reason = format!("unknown recipe: expected one of {}", Self::ALL.map(Self::name).join(", "));
            Float8Error::config("recipe", format!("{name:?}"), reason)
        })
    }
}
