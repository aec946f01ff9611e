//! FP8 weights in files, in the format of compressed-tensors, transformers and vLLM. `X.weight` in
//! `F8_E4M3`, `[out, in]`, is the operand of fprop. Its codes are multiplied by scales.

mod error;
mod formats;
mod names;
mod plan;
mod scheme;
mod weight;

pub use error::Float8FilesError;
pub(super) use plan::{Model, Plan, Planned};
pub(super) use scheme::{Quantization, Scheme};
pub(crate) use weight::{Float8Weight, Float8Weights, check_finite, quantize};
