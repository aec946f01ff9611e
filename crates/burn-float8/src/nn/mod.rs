//! What a model calls by name, on any backend: on one that is no [`Float8`](crate::Float8) it is made of Burn's operations.
mod attention;
mod fused;
mod grouped;

pub use attention::{attention, attention_but, cached_attention};
pub use fused::{log_likelihood, rms_norm, rotary, swiglu};
pub use grouped::{GroupedLinear, grouped_linear};
