//! [`ElementType`]: dtype of a kernel's input.

use cubecl::ir::{ElemType, FloatKind, StorageType};

use crate::KernelError;

/// Dtype of an element, which determines its conversion to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ElementType {
    F32,
    F16,
    Bf16,
}

impl ElementType {
    pub(crate) fn of(dtype: StorageType) -> Result<Self, KernelError> {
        match dtype {
            // CubeCL stores flex32 as f32.
            StorageType::Scalar(ElemType::Float(FloatKind::F32 | FloatKind::Flex32)) => Ok(Self::F32),
            StorageType::Scalar(ElemType::Float(FloatKind::F16)) => Ok(Self::F16),
            StorageType::Scalar(ElemType::Float(FloatKind::BF16)) => Ok(Self::Bf16),
            _ => Err(KernelError::UnsupportedDtype { dtype }),
        }
    }

    /// Dtype in memory: f32 for flex32, which not every device reports.
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

    /// Half a step of a normal number, relative: the largest error of rounding to nearest.
    pub(crate) fn rounding(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-24),
            Self::F16 => 2f64.powi(-11),
            Self::Bf16 => 2f64.powi(-8),
        }
    }

    /// Elements per word.
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
}
