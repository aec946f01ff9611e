//! Functions for models on any backend. On a backend without [`Float8`](crate::Float8) they use
//! Burn's operations.
mod attention;
mod experts;
mod fused;
mod grouped;
mod parallel;

pub use attention::{attention, attention_but, cached_attention};
pub use experts::{Dispatched, ExpertRoute, dispatch};
pub use fused::{log_likelihood, rms_norm, rotary, swiglu};
pub use grouped::{GroupedLinear, grouped_linear};
pub use parallel::{parallel_log_likelihood, parallel_ranks, parallel_tokens};
