//! [`share_left`]: how much of the adapters remains after the merged weights are rounded.

use std::path::Path;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_float8::lora::Lora;

use super::checkpoint::{Checkpoint, RepeatedHead};
use super::names;
use super::parameters::{parameters, read};
use crate::model::ModelConfig;

/// Share of the adapters' weight change that remains in files. `model` has the merged weights w' =
/// w + Δ, Δ = α/r · A·B. `folder` has them rounded, q:
///
/// ```text
/// Σ Δ · (q − w) / Σ Δ² = 1 + Σ Δ · (q − w') / Σ Δ²
/// ```
///
/// It is 1 where rounding errors cancel, and 0 where each weight is rounded to its value without
/// adapters. `None` if the adapters change nothing.
///
/// # Errors
/// The errors of reading the folder and the device.
pub(crate) fn share_left<B: Backend, M: Module<B>, C: ModelConfig>(
    lora: &Lora<B>,
    model: &M,
    config: &C,
    folder: &Path,
) -> Result<Option<f64>> {
    let files = Checkpoint::open(folder, config, RepeatedHead::IsLeftOut)?;
    let (mut squares, mut lost) = (0.0, 0.0);
    for parameter in parameters(model) {
        let adapter = |linear: &str| lora.adapters.iter().find(|adapter| adapter.name == linear);
        let Some(adapter) = names::linear(&parameter.path).and_then(adapter) else { continue };
        let Ok(dims) = <[usize; 2]>::try_from(&parameter.shape[..]) else { continue };
        let scale = lora.config.scale_of(&adapter.name);
        let change = adapter.a.val().matmul(adapter.b.val()).mul_scalar(scale).transpose();
        let change = read(&change, "reading the adapters")?;
        let (merged, rounded) = ((parameter.read)()?, files.linear_f32(&names::hf_name(&parameter.path), dims)?);
        for ((change, merged), rounded) in change.into_iter().zip(merged).zip(rounded) {
            squares += f64::from(change).powi(2);
            lost += f64::from(change) * (f64::from(rounded) - f64::from(merged));
        }
    }
    Ok((squares > 0.0).then(|| 1.0 + lost / squares))
}
