//! FP8 weights in files, as compressed-tensors, transformers and vLLM have them: `X.weight` in `F8_E4M3`, `[out, in]`, which is the
//! operand of fprop, and scales that multiply its codes.

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
