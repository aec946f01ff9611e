//! Tensors of the decorator, and the FP8 copies that linears make of them: when a tensor is cast, and how long the codes live.
mod ahead;
mod cache;
mod cast;
mod copies;
mod gathered;
mod recent;
mod sample;
mod wrapped;

pub(crate) use ahead::{Ahead, ShardedWeight};
pub(crate) use cache::{AmaxOf, Fp8Copy, Layout};
pub(crate) use cast::{CastRequest, View};
pub(crate) use copies::fp8_copy;
pub(crate) use gathered::amaxes_to_reduce;
pub(crate) use recent::clear as clear_recent;
pub(crate) use sample::{push_sample, sample, take_sample};
pub use wrapped::{Float8Tensor, Wrapped};
