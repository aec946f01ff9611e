//! Switches FP8 on and off for a model or a part of it.
use burn::module::Module;
use burn_backend::tensor::FloatTensor;

use super::walk::{Change, linears, map_params};
use crate::layer::Tag;
use crate::stack::Float8Stack;

/// Switches FP8 on or off for the converted linears of a model or a part of it. The switch also
/// affects clones, `valid()` copies and replicas, which share their layers. Applying the same
/// configuration again does not change it.
///
/// A backward pass follows the switch in its forward. The report shows the reason
/// `precision schedule`. Strict mode allows it.
///
#[doc = include_str!("../layer/switches.md")]
pub fn set_float8_enabled<B: Float8Stack, M: Module<B>>(model: &M, enabled: bool) {
    for linear in linears::<B, M>(model, None) {
        if let Some(tag) = linear.tag {
            tag.layer.set_enabled(enabled);
        }
    }
}

/// Returns a copy of a model or a part of it whose linears run in high precision, forward and
/// backward. Other linears that share their layers are not affected:
/// `without_float8(model.valid())` evaluates in high precision. Tensors that are loaded later or
/// returned by an optimizer also stay in high precision, until a configuration is applied.
///
#[doc = include_str!("../layer/switches.md")]
pub fn without_float8<B: Float8Stack, M: Module<B>>(model: M) -> M {
    map_params::<B, M>(model, |_| {
        Change::map(|t: FloatTensor<B>| match t.tag().cloned() {
            Some(tag) => t.tagged(Tag { enabled: false, ..tag }),
            None => t,
        })
    })
}
