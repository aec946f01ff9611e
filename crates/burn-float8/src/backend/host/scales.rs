//! [`Scales`]: inverse scales of codes in host memory; one byte each if they are E8M0.
use std::borrow::Cow;

use float8_kernels::{Granularity, InvScale};

/// Inverse scales.
#[derive(Debug)]
pub(super) enum Scales {
    F32(Vec<InvScale>),
    /// E8M0 bytes: powers of two and NaN.
    E8m0(Vec<u8>),
}

impl Scales {
    /// Scales of an operand of this granularity.
    pub(super) fn new(scales: Vec<InvScale>, granularity: Granularity) -> Self {
        if granularity != Granularity::Block1x32 {
            return Self::F32(scales);
        }
        let mut bytes = Vec::with_capacity(scales.len());
        bytes.extend(scales.iter().map_while(|scale| scale.to_e8m0()));
        if bytes.len() == scales.len() { Self::E8m0(bytes) } else { Self::F32(scales) }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::F32(scales) => 4 * scales.len() as u64,
            Self::E8m0(bytes) => bytes.len() as u64,
        }
    }

    #[inline(always)]
    pub(super) fn get(&self, i: usize) -> InvScale {
        match self {
            Self::F32(scales) => scales[i],
            Self::E8m0(bytes) => InvScale::from_e8m0(bytes[i]),
        }
    }

    /// All scales.
    pub(super) fn values(&self) -> Cow<'_, [InvScale]> {
        match self {
            Self::F32(scales) => Cow::Borrowed(scales),
            Self::E8m0(bytes) => Cow::Owned(bytes.iter().map(|byte| InvScale::from_e8m0(*byte)).collect()),
        }
    }

    /// Scales at these indices.
    pub(super) fn at(&self, places: impl Iterator<Item = usize>) -> Self {
        match self {
            Self::F32(scales) => Self::F32(places.map(|i| scales[i]).collect()),
            Self::E8m0(bytes) => Self::E8m0(places.map(|i| bytes[i]).collect()),
        }
    }
}
