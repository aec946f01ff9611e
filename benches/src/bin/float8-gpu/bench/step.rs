//! Train steps of a Llama, in high precision and in every recipe.
//!
//! High precision is the same model with FP8 off: hidden states in the compute dtype, parameters in
//! f32.

use anyhow::Context;
use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Recipe, report, set_default_config};
use kernel_tests::Failure;
use models::{Decoder, DecoderConfig, RunConfig};
use serde_json::{Value, json};
use trainer::rng::Rng;

use super::timing::Clock;
use super::{Bench, Size, beside};
use crate::target::Target;

type Backend<T> = Float8<Autodiff<<T as Target>::Backend>>;

/// Preset of a model, fewer layers than it has, and sequences with their length.
type Case = (&'static str, Option<usize>, [usize; 2]);

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let full = [("1b", None, [4, 2048]), ("8b", Some(8), [4, 2048])];
    let all: Vec<_> = std::iter::once(None).chain(Recipe::ALL.map(Some)).collect();
    let recipes =
        if bench.size == Size::First { vec![Some(Recipe::Tensorwise), None] } else { bench.size.of(&all, 3, &all) };
    for case @ (preset, layers, _) in bench.size.of(&[("debug", Some(2), [2, 16])], 1, &full) {
        let model = layers.map_or_else(|| preset.to_string(), |layers| format!("{preset}, {layers} layers"));
        for &recipe in &recipes {
            let plain = || format!("{:?}", T::compute_dtype()).to_lowercase();
            let precision = recipe.map_or_else(plain, |recipe| recipe.to_string());
            bench.case(&format!("step {model} {precision}"), |clock| {
                let row = measure::<T>(clock, case, recipe, (&model, &precision));
                row.map_err(|error| Failure::Wrong(format!("{error:#}")))
            });
        }
    }
}

/// Row of a step, and of the layers' attention, which is measured separately.
fn measure<T: Target>(
    clock: Clock,
    (preset, layers, batch): Case,
    recipe: Option<Recipe>,
    (name, precision): (&str, &str),
) -> anyhow::Result<Value> {
    let device = Default::default();
    let mut config = DecoderConfig::preset(&format!("llama3-{preset}"))?;
    config.dims.num_layers = layers.unwrap_or(config.dims.num_layers);
    let mut model = Decoder::<Backend<T>>::new(config, &device)?.with_compute_dtype(T::compute_dtype());
    if let Some(recipe) = recipe {
        let mut run = RunConfig::default();
        run.float8.config = Float8Config::new(recipe);
        model = run.float8(&config).apply::<Backend<T>, _>(model)?.0;
    }
    set_default_config::<Backend<T>>(&device, recipe.map(|_| Float8Config::default()).as_ref())?;
    let [inputs, targets] = ["inputs", "targets"].map(|name| {
        let mut rng = Rng::named(0, name);
        let tokens: Vec<i32> = (0..batch[0] * batch[1]).map(|_| rng.below(config.dims.vocab_size) as i32).collect();
        Tensor::<Backend<T>, 2, Int>::from_data(TensorData::new(tokens, batch), &device)
    });
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Some(model);
    let seconds = clock.seconds::<T>(|_| {
        let current = model.take().expect("put back after every step");
        let grads = current.loss(inputs.clone(), targets.clone()).backward();
        let grads = GradientsParams::from_grads(grads, &current);
        model = Some(optimizer.step(1e-4, current, grads));
    });
    let model = model.context("put back after every step")?;
    let ran = report(&model);
    if recipe.is_some() {
        ran.verify()?;
    }
    drop((model, optimizer, inputs, targets));
    T::sync();
    T::client().memory_cleanup();
    let dims = config.dims;
    let heads = [dims.num_heads, dims.num_kv_heads];
    let attention =
        dims.num_layers as f64 * beside::attention_seconds::<T>(clock, heads, [batch[0], batch[1], dims.head_dim]);
    Ok(json!({
        "model": name, "batch": batch, "precision": precision, "fp8": recipe.is_some(), "milliseconds": seconds * 1e3,
        "tokens_per_second": (batch[0] * batch[1]) as f64 / seconds, "speedup": null,
        "attention_share": attention / seconds, "gemms": ran.totals().to_string(),
    }))
}
