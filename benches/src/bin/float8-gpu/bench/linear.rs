//! Forward and backward of one linear, the casts of x, w and dy included.

use benches::linear::{float8_step, inputs, plain_step};
use burn::backend::Autodiff;
use burn::tensor::ops::FloatTensor;
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Recipe, backend::Float8Backend, report::Gemm, set_default_config,
};
use serde_json::json;

use super::data::sets;
use super::{Bench, Size};
use crate::target::Target;

/// M, K and N.
pub fn shapes(size: Size) -> Vec<[usize; 3]> {
    size.of(&[[64, 128, 96]], 2, &[[8192, 4096, 4096], [8192, 8192, 8192], [8192, 4096, 14_336]])
}

/// Recipes without a history, which would need a layer.
fn configs(size: Size) -> Vec<(String, Float8LinearConfig)> {
    let tensorwise = Float8LinearConfig::new(Recipe::Tensorwise);
    let fast = Gemm::ALL.into_iter().fold(tensorwise, |config, gemm| config.with_use_fast_accum(gemm, true));
    let recipes = Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::Delayed);
    let mut configs: Vec<_> = recipes.map(|recipe| (recipe.to_string(), Float8LinearConfig::new(recipe))).collect();
    configs.insert(1, ("tensorwise, fast accumulation".into(), fast));
    let blockwise = configs.iter().position(|(_, config)| config.recipe() == Recipe::Blockwise).expect("a recipe");
    // Scales that Blackwell's tensor cores apply.
    let rounded = Float8LinearConfig::new(Recipe::Blockwise).with_round_scales_to_power_of_2(true);
    configs.insert(blockwise + 1, ("blockwise, powers of two".into(), rounded));
    match size {
        Size::First => configs.truncate(1),
        Size::Headline => configs.truncate(3),
        Size::Tiny | Size::Full => {}
    }
    configs
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    for shape @ [m, k, n] in shapes(bench.size) {
        let plain = [(format!("{:?}", T::compute_dtype()).to_lowercase(), None)];
        let float8 = configs(bench.size).into_iter().map(|(precision, config)| (precision, Some(config)));
        for (precision, config) in plain.into_iter().chain(float8) {
            bench.case(&format!("linear {m}x{k}x{n} {precision}"), |clock| {
                let set = |_| inputs::<T::Backend>(shape, T::compute_dtype());
                let inputs: Vec<_> = (0..sets(2 * (m * k + k * n + m * n)).max(2)).map(set).collect();
                let step: fn([FloatTensor<T::Backend>; 4]) = match &config {
                    None => plain_step::<T::Backend>,
                    Some(config) => {
                        with_default::<T>(&config.clone().into());
                        float8_step::<T::Backend>
                    }
                };
                let seconds = clock.rotate::<T, _>(&inputs, |inputs| step(inputs.clone()));
                with_default::<T>(&Float8Config::default());
                let path = config.map(|config| {
                    let gemm = config.gemm_config(Gemm::Fprop);
                    let facts = T::Backend::fp8_facts(&Default::default());
                    facts.gemm_path(Some(m), config.casts().granularities(Gemm::Fprop), gemm).to_string()
                });
                let (milliseconds, fp8) = (seconds * 1e3, path.is_some());
                Ok(json!({
                    "shape": shape, "precision": precision, "fp8": fp8, "milliseconds": milliseconds, "speedup": null,
                    "torch_bf16": null, "path": path,
                }))
            });
        }
    }
}

/// Sets the device's default configuration, for linears outside of a model.
pub fn with_default<T: Target>(config: &Float8Config) {
    set_default_config::<Float8<Autodiff<T::Backend>>>(&Default::default(), Some(config))
        .expect("a recipe without a history");
}
