//! [`independent_rows`]: batch invariance of a model's linears.
use burn::module::Module;
use burn_backend::TensorMetadata;

use super::walk::linears;
use crate::backend::Float8Backend;
use crate::layer::Layer;
use crate::stack::Float8Stack;
use crate::step::DeviceState;
use crate::terms::{Gemm, Operand, Role};

/// Maximum number of rows that each linear of `model` computes independently of each other, bit for
/// bit. Linears named in `except` are ignored. The result is 1 if a linear runs in high precision,
/// has an adapter, is grouped, or has one dynamic scale for all rows.
///
/// On CPUs it is 4 if rows have their own scales (`rowwise`, `blockwise`, `mxfp8`) or the scale of
/// a history (`delayed`).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::Flex;
/// use burn::nn::{Linear, LinearConfig};
/// use burn_float8::report::independent_rows;
/// use burn_float8::{Float8, Float8Config, Recipe};
///
/// let model: Linear<Float8<Flex>> = LinearConfig::new(64, 32).init(&Default::default());
/// let (model, _) = Float8Config::new(Recipe::Rowwise).apply(model).unwrap();
/// assert_eq!(independent_rows(&model, &[]), 4);
/// # }
/// ```
pub fn independent_rows<B: Float8Stack, M: Module<B>>(model: &M, except: &[&str]) -> usize {
    let linears = linears::<B, M>(model, None);
    let of_device = linears.first().map_or(1, |linear| B::Inner::fp8_facts(&linear.device).independent_rows);
    let are_independent = linears.iter().all(|linear| {
        // One expert may get the rows of all.
        let is_alone = linear.weight.as_ref().is_some_and(|weight| weight.rank() == 2);
        let has_adapter = || linear.weight.as_ref().is_some_and(|weight| weight.adapters().is_some());
        let is_enabled = linear.tag.as_ref().is_some_and(|tag| tag.enabled);
        except.contains(&&*linear.info.name)
            || is_alone
                && is_enabled
                && !has_adapter()
                && linear.layer().is_some_and(|layer| has_scales_of_rows::<B::Inner>(layer, &linear.device))
    });
    if are_independent { of_device } else { 1 }
}

/// Whether fprop runs in FP8 and no row of x affects the scale of another.
fn has_scales_of_rows<B: Float8Backend>(layer: &Layer, device: &B::Device) -> bool {
    let Ok(plan) = layer.plan(None) else { return false };
    let cast = plan.gemm(Gemm::Fprop).ok().and_then(|_| plan.cast(Operand::INPUT));
    cast.is_some_and(|cast| match cast.delayed {
        Some(scaling) => DeviceState::<B>::of(layer, device).scaling_amax(layer, Role::Input, scaling).is_some(),
        None => cast.cast.granularity.group(2, 1)[0] == 1,
    })
}
