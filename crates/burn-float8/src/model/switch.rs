//! FP8 on and off for a model or a part of it.
use burn::module::Module;

use super::walk::{Change, linears, map_params};
use crate::layer::Tag;
use crate::stack::Float8Stack;

/// Switches FP8 on or off for the converted linears of a model or of a part of it, and for those that share their layers:
/// clones, `valid()` copies, replicas; the same configuration that is applied again leaves it so. A backward pass runs as
/// the switch stood in its forward. The report gives the reason `precision schedule`; strict mode does not
/// mind.
///
#[doc = include_str!("../layer/switches.md")]
pub fn set_float8_enabled<B: Float8Stack, M: Module<B>>(model: &M, enabled: bool) {
    for linear in linears::<B, M>(model, None) {
        if let Some(tag) = linear.tag {
            tag.layer.set_enabled(enabled);
        }
    }
}

/// A copy of a model or of a part of it whose linears run in high precision, forward and backward, while those that share their
/// layers run as before: `without_float8(model.valid())` evaluates in high precision. What is loaded into it later, as what an
/// optimizer makes of it, stays without FP8 until a configuration is applied.
///
#[doc = include_str!("../layer/switches.md")]
pub fn without_float8<B: Float8Stack, M: Module<B>>(model: M) -> M {
    map_params::<B, M>(model, |_| {
        Change::map(|t| match B::tag(&t) {
            Some(tag) => B::with_tag(t, Tag { enabled: false, ..tag }),
            None => t,
        })
    })
}
