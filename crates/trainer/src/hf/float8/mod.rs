//! FP8 weights in files, in the format of compressed-tensors, transformers and vLLM. `X.weight` in
//! `F8_E4M3`, `[out, in]`, is the operand of fprop. Its codes are multiplied by scales.

mod plan;
mod quantization;
mod scheme;
mod weight;

pub(super) use plan::{Float8Plan, Planned};
pub(super) use quantization::Quantization;
pub(crate) use scheme::Scheme;
pub(crate) use weight::quantize;
pub(super) use weight::{StoredWeight, check_finite};
