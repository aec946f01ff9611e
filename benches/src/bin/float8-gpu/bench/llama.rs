//! A Llama layer and whole train steps, in high precision and in every recipe.
//!
//! High precision is the same model with FP8 off: hidden states in the compute dtype, parameters in
//! f32.

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Float8Error, Recipe, report, set_default_config};
use checks::Failure;
use models::{Decoder, DecoderConfig, RunConfig};
use serde::{Deserialize, Serialize};
use trainer::rng::Rng;

use super::timing::{Clock, or_dash};
use super::{Bench, Size, beside, headed};
use crate::target::Target;

type Backend<T> = Float8<Autodiff<<T as Target>::Backend>>;

/// One precision of one model.
#[derive(Serialize, Deserialize)]
pub struct Row {
    model: String,
    /// Sequences and their length.
    batch: [usize; 2],
    precision: String,
    milliseconds: f64,
    tokens_per_second: f64,
    /// Time of high precision / time of this, if measured.
    speedup: Option<f64>,
    /// Whether linears run in FP8.
    is_fp8: bool,
    /// GEMM calls of linears by path, since the model was created.
    gemms: String,
    /// Time of the layers' attention, measured separately, as a share of a step.
    attention_share: Option<f64>,
}

/// Model and batch of a case: a preset, optionally with fewer layers or a smaller vocabulary.
#[derive(Clone, Copy)]
struct Case {
    preset: &'static str,
    layers: Option<usize>,
    vocab: Option<usize>,
    batch: [usize; 2],
}

impl Case {
    fn name(&self) -> String {
        self.layers.map_or_else(|| self.preset.into(), |layers| format!("{}, {layers} layers", self.preset))
    }

    fn config(&self) -> anyhow::Result<DecoderConfig> {
        let mut config = DecoderConfig::preset(&format!("llama3-{}", self.preset))?;
        config.dims.num_layers = self.layers.unwrap_or(config.dims.num_layers);
        config.dims.vocab_size = self.vocab.unwrap_or(config.dims.vocab_size);
        Ok(config)
    }
}

/// Precisions; None is high precision.
fn precisions(size: Size) -> Vec<Option<Recipe>> {
    if size == Size::First {
        return vec![Some(Recipe::Tensorwise), None];
    }
    let all: Vec<_> = std::iter::once(None).chain(Recipe::ALL.map(Some)).collect();
    size.of(&all, 3, &all)
}

pub fn layers<T: Target>(bench: &mut Bench<'_>) {
    let case = |preset, layers, vocab, batch| Case { preset, layers, vocab, batch };
    let tiny = case("debug", Some(1), None, [2, 16]);
    // A small vocabulary keeps the output layer out of the measurement.
    let full = [case("8b", Some(1), Some(256), [4, 2048]), case("70b", Some(1), Some(256), [2, 2048])];
    cases::<T>(bench, "layer", &[tiny], &full, super::Row::Layer);
}

pub fn steps<T: Target>(bench: &mut Bench<'_>) {
    let case = |preset, layers, vocab, batch| Case { preset, layers, vocab, batch };
    let tiny = case("debug", Some(2), None, [2, 16]);
    let full = [case("1b", None, None, [4, 2048]), case("8b", Some(8), None, [4, 2048])];
    cases::<T>(bench, "step", &[tiny], &full, super::Row::Step);
}

fn cases<T: Target>(bench: &mut Bench<'_>, what: &str, tiny: &[Case], full: &[Case], row: fn(Row) -> super::Row) {
    for case in bench.size.of(tiny, 1, full) {
        for recipe in precisions(bench.size) {
            let plain = || format!("{:?}", T::compute_dtype()).to_lowercase();
            let precision = recipe.map_or_else(plain, |recipe| recipe.to_string());
            let model = case.name();
            bench.case(&format!("{what} {model} {precision}"), |clock| {
                let measured = measure::<T>(clock, &case, recipe, what == "step");
                let (seconds, gemms) = measured.map_err(|error| Failure::Wrong(error.to_string()))?;
                let dims = case.config().map_err(|error| Failure::Wrong(error.to_string()))?.dims;
                let [batch, len] = case.batch;
                let attention = (what == "step").then(|| {
                    let heads = [dims.num_heads, dims.num_kv_heads];
                    dims.num_layers as f64 * beside::attention_seconds::<T>(clock, heads, [batch, len, dims.head_dim])
                });
                Ok(row(Row {
                    model,
                    batch: case.batch,
                    precision,
                    milliseconds: seconds * 1e3,
                    tokens_per_second: (case.batch[0] * case.batch[1]) as f64 / seconds,
                    speedup: None,
                    is_fp8: recipe.is_some(),
                    gemms,
                    attention_share: attention.map(|attention| attention / seconds),
                }))
            });
        }
    }
}

/// Computes speedups over high precision, if measured.
pub fn compare(rows: &mut [Row]) {
    let plain = rows.iter().filter(|row| !row.is_fp8).map(|row| (row.model.clone(), row.milliseconds));
    let plain: Vec<_> = plain.collect();
    for row in rows {
        let plain = plain.iter().find(|(model, _)| *model == row.model);
        row.speedup = plain.map(|(_, milliseconds)| milliseconds / row.milliseconds);
    }
}

/// Median seconds of forward and backward, with the optimizer step if `update` is set; and the GEMM
/// calls of its linears.
fn measure<T: Target>(
    clock: Clock,
    case: &Case,
    recipe: Option<Recipe>,
    update: bool,
) -> Result<(f64, String), Box<dyn std::error::Error>> {
    let device = Default::default();
    let config = &case.config()?;
    let model = Decoder::<Backend<T>>::new(*config, &device)?.with_compute_dtype(T::compute_dtype());
    let (model, on) = match recipe {
        None => (model, None),
        Some(recipe) => {
            let mut run = RunConfig::default();
            run.float8.config = Float8Config::new(recipe);
            (
                run.float8(config).apply::<Backend<T>, _>(model).map_err(Float8Error::from)?.0,
                Some(Float8Config::default()),
            )
        }
    };
    set_default_config::<Backend<T>>(&device, on.as_ref())?;
    let [inputs, targets] = ["inputs", "targets"].map(|name| {
        let mut rng = Rng::named(0, name);
        let tokens: Vec<i32> =
            (0..case.batch[0] * case.batch[1]).map(|_| rng.below(config.dims.vocab_size) as i32).collect();
        Tensor::<Backend<T>, 2, Int>::from_data(TensorData::new(tokens, case.batch), &device)
    });
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Some(model);
    let seconds = clock.seconds::<T>(|_| {
        let current = model.take().expect("put back after every step");
        let grads = current.loss(inputs.clone(), targets.clone()).backward();
        model = Some(if update {
            let grads = GradientsParams::from_grads(grads, &current);
            optimizer.step(1e-4, current, grads)
        } else {
            current
        });
    });
    let model = model.expect("put back after every step");
    let ran = report(&model);
    if recipe.is_some() {
        ran.verify()?;
    }
    let gemms = ran.totals().to_string();
    drop((model, optimizer, inputs, targets));
    T::sync();
    T::client().memory_cleanup();
    Ok((seconds, gemms))
}

pub fn print(title: &str, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    headed(title);
    println!(
        "{:<14}  {:>10}  {:<20}  {:>9}  {:>10}  {:>7}  {:>9}  GEMMs",
        "model", "tokens", "precision", "ms", "tokens/s", "speedup", "attention"
    );
    for row in rows {
        let Row { model, batch: [b, t], precision, milliseconds, tokens_per_second, speedup, gemms, .. } = row;
        println!(
            "{model:<14}  {:>10}  {precision:<20}  {milliseconds:>9.2}  {tokens_per_second:>10.0}  {:>7}  {:>9}  {}",
            format!("{b} x {t}"),
            or_dash(*speedup, 2),
            or_dash(row.attention_share, 2),
            gemms.trim_start_matches("GEMMs: "),
        );
    }
}
