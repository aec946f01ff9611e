//! Checks kernel variants against the scalar reference, on generated operands.
//!
//! Operands depend on a seed. Otherwise memory from an earlier check could pass for the result of a
//! lost launch.

mod adamw;
mod attention;
mod cast;
mod fused;
mod gemm;
mod halves;

use core::fmt;

use cubecl::future::block_on;
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

pub use attention::{AttentionCase, Broadcast, MASK_BYTES, MASK_WORDS};
pub use cast::CastVariant;
pub use fused::FusedVariant;

pub use crate::adamw::AdamWVariant;
pub use crate::attention::AttentionVariant;
use crate::element_type::ElementType;
pub use crate::gemm::{GemmVariant, HalfGemmVariant};
use crate::mx::to_blocked;
use crate::reference::HostOperand;
use crate::{KernelError, MatrixView, Operand, row_words};

/// A kernel with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// A cast.
    Cast(CastVariant),
    /// A GEMM.
    Gemm(GemmVariant),
    /// A product of 16-bit matrices.
    HalfGemm(HalfGemmVariant),
    /// A fused operation.
    Fused(FusedVariant),
    /// Attention.
    Attention(AttentionVariant),
    /// AdamW.
    AdamW(AdamWVariant),
}

/// Reason why a variant failed its check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// The variant does not support these operands.
    Unsupported(KernelError),
    /// The result differs from the reference.
    Wrong(String),
    /// The device returned an error instead of a result.
    Refused(String),
}

impl From<KernelError> for Flaw {
    fn from(error: KernelError) -> Self {
        Self::Unsupported(error)
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported(error) => error.fmt(f),
            Self::Wrong(text) | Self::Refused(text) => f.write_str(text),
        }
    }
}

impl Variant {
    /// Runs the variant on generated operands and compares the whole result with the scalar
    /// reference.
    ///
    /// # Errors
    /// The first flaw.
    pub fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        match self {
            Self::Cast(cast) => cast.judge(client, seed),
            Self::Gemm(gemm) => gemm::judge(gemm, client, seed),
            Self::HalfGemm(gemm) => gemm.judge(client, seed),
            Self::Fused(fused) => fused.judge(client, seed),
            Self::Attention(attention) => attention.judge(client, seed),
            Self::AdamW(adamw) => adamw.judge(client, seed),
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cast(cast) => cast.fmt(f),
            Self::Gemm(gemm) => gemm.fmt(f),
            Self::HalfGemm(gemm) => gemm.fmt(f),
            Self::Fused(fused) => fused.fmt(f),
            Self::Attention(attention) => attention.fmt(f),
            Self::AdamW(adamw) => adamw.fmt(f),
        }
    }
}

/// Number `i` of the SplitMix64 sequence of a seed. Source: Steele, Lea and Flood, *Fast Splittable
/// Pseudorandom Number Generators* (2014), and Vigna's `splitmix64.c`.
pub fn split_mix(seed: u64, i: u64) -> u64 {
    let z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Bytes of values in a dtype, and the values after rounding to it.
///
/// # Errors
/// [`KernelError::UnsupportedDtype`].
pub fn in_dtype(values: &[f32], dtype: StorageType) -> Result<(Vec<u8>, Vec<f32>), KernelError> {
    let halves = |bits: fn(f32) -> u16, value: fn(u16) -> f32| {
        let bits: Vec<u16> = values.iter().map(|x| bits(*x)).collect();
        (bits.iter().flat_map(|x| x.to_le_bytes()).collect(), bits.into_iter().map(value).collect())
    };
    Ok(match ElementType::of(dtype)? {
        ElementType::F32 => (values.iter().flat_map(|x| x.to_le_bytes()).collect(), values.to_vec()),
        ElementType::F16 => halves(|x| f16::from_f32(x).to_bits(), |x| f16::from_bits(x).to_f32()),
        ElementType::Bf16 => halves(|x| bf16::from_f32(x).to_bits(), |x| bf16::from_bits(x).to_f32()),
    })
}

/// Uploads an operand to a device.
///
/// # Panics
/// If a slice does not have the length of its shape, or an E8M0 scale is not a power of two.
pub fn upload_operand<R: Runtime>(client: &ComputeClient<R>, operand: &HostOperand<'_>, power_of_two: bool) -> Operand {
    let &HostOperand { codes, rows, k, format, granularity, inv_scales } = operand;
    let pitch = 4 * row_words(k);
    let mut padded = vec![0; rows * pitch];
    for (padded, row) in padded.chunks_exact_mut(pitch).zip(codes.chunks_exact(k)) {
        padded[..k].copy_from_slice(row);
    }
    let scales: Vec<u8> = if granularity.is_mx() {
        let bytes = inv_scales.iter().map(|scale| scale.to_e8m0().expect("a power of two, or NaN"));
        to_blocked(&bytes.collect::<Vec<_>>(), rows, granularity.scale_dims(rows, k)[1])
    } else {
        inv_scales.iter().flat_map(|scale| scale.get().to_le_bytes()).collect()
    };
    let [codes, inv_scale] = [&padded, &scales].map(|bytes| client.create_from_slice(bytes));
    Operand { codes, inv_scale, rows, k, format, granularity, power_of_two }
}

/// Uploads a dense matrix, after `base` other elements. Also returns its values after rounding to
/// the dtype.
fn upload<R: Runtime>(
    client: &ComputeClient<R>,
    values: &[f32],
    cols: usize,
    dtype: StorageType,
    base: usize,
) -> Result<(MatrixView, Vec<f32>), KernelError> {
    let (bytes, values) = in_dtype(values, dtype)?;
    let before = base * ElementType::of(dtype)?.size();
    let mut handle = client.create_from_slice(&[vec![0; before], bytes].concat());
    if before > 0 {
        handle = handle.offset_start(before as u64);
    }
    Ok((MatrixView { handle, shape: [values.len() / cols, cols], strides: [cols, 1], dtype }, values))
}

/// Reads bytes from device memory.
fn read<R: Runtime>(client: &ComputeClient<R>, handles: &[&Handle]) -> Result<Vec<Vec<u8>>, Flaw> {
    let handles = handles.iter().map(|handle| (*handle).clone()).collect();
    let read = block_on(client.read_async(handles)).map_err(|error| Flaw::Refused(error.to_string()))?;
    Ok(read.iter().map(|bytes| bytes.to_vec()).collect())
}

/// f32 values of bytes in a dtype.
///
/// # Errors
/// [`KernelError::UnsupportedDtype`].
pub fn floats(bytes: &[u8], dtype: StorageType) -> Result<Vec<f32>, KernelError> {
    let halves = || bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    Ok(match ElementType::of(dtype)? {
        ElementType::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        ElementType::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        ElementType::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First numbers of the seed 1234567, as published with `splitmix64.c`.
    #[test]
    fn split_mix_is_the_published_sequence() {
        let numbers = [0, 1, 2].map(|i| split_mix(1_234_567, i));
        assert_eq!(numbers, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }
}
