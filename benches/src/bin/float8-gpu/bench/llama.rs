//! A Llama layer, and whole train steps, in high precision and in every recipe.
//!
//! High precision is the same model with FP8 off: hidden states in the compute dtype, parameters in f32.

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Float8Error, Recipe, report, set_default_config};
use llama3::rng::Rng;
use llama3::{Llama, LlamaConfig, RunConfig};
use serde::Serialize;

use super::timing::{Timer, or_dash};
use crate::Error;
use crate::target::Target;

type Backend<T> = Autodiff<Float8<<T as Target>::Backend>>;

/// One precision of one model.
#[derive(Serialize)]
pub struct Row {
    model: String,
    /// Sequences and their length.
    batch: [usize; 2],
    precision: String,
    milliseconds: f64,
    tokens_per_second: f64,
    /// High precision / this.
    speedup: Option<f64>,
    /// GEMM calls of linears by path, since the model was made.
    gemms: String,
}

/// What is run: a model by name, its dimensions, and the batch.
struct Case {
    name: String,
    config: LlamaConfig,
    batch: [usize; 2],
}

impl Case {
    /// A preset with so many layers, if they are cut, and so many tokens in its vocabulary.
    fn new(preset: &str, layers: Option<usize>, vocab: Option<usize>, batch: [usize; 2]) -> Result<Self, Error> {
        let mut config = LlamaConfig::preset(preset)?;
        let name = layers.map_or_else(|| preset.into(), |layers| format!("{preset}, {layers} layers"));
        config.num_layers = layers.unwrap_or(config.num_layers);
        config.vocab_size = vocab.unwrap_or(config.vocab_size);
        Ok(Self { name, config, batch })
    }
}

/// None for high precision.
fn precisions() -> Vec<Option<Recipe>> {
    std::iter::once(None).chain(Recipe::ALL.map(Some)).collect()
}

pub fn layers<T: Target>(timer: &mut Timer, quick: bool) -> Vec<Row> {
    let cases = if quick {
        vec![Case::new("debug", Some(1), None, [2, 16])]
    } else {
        // Little vocabulary: the output layer is not what is measured.
        vec![Case::new("8b", Some(1), Some(256), [4, 2048]), Case::new("70b", Some(1), Some(256), [2, 2048])]
    };
    rows::<T>(timer, "layer", cases, false)
}

pub fn steps<T: Target>(timer: &mut Timer, quick: bool) -> Vec<Row> {
    let cases = if quick {
        vec![Case::new("debug", Some(2), None, [2, 16])]
    } else {
        vec![Case::new("1b", None, None, [4, 2048]), Case::new("8b", Some(8), None, [4, 2048])]
    };
    rows::<T>(timer, "step", cases, true)
}

fn rows<T: Target>(timer: &mut Timer, what: &str, cases: Vec<Result<Case, Error>>, update: bool) -> Vec<Row> {
    let mut rows = vec![];
    for case in cases {
        let case = match case {
            Ok(case) => case,
            Err(error) => {
                timer.skip(what, &error);
                continue;
            }
        };
        let mut plain = None;
        for recipe in precisions() {
            let precision =
                recipe.map_or_else(|| format!("{:?}", T::compute_dtype()).to_lowercase(), |recipe| recipe.to_string());
            let name = format!("{what} {} {precision}", case.name);
            let measured = match timer.case(&name, |timer| measure::<T>(timer, &case, recipe, update)) {
                Some(Ok(measured)) => measured,
                Some(Err(error)) => {
                    timer.skip(&name, &error);
                    continue;
                }
                None => continue,
            };
            let (seconds, gemms) = measured;
            if recipe.is_none() {
                plain = Some(seconds);
            }
            rows.push(Row {
                model: case.name.clone(),
                batch: case.batch,
                precision,
                milliseconds: seconds * 1e3,
                tokens_per_second: (case.batch[0] * case.batch[1]) as f64 / seconds,
                speedup: plain.map(|plain| plain / seconds),
                gemms,
            });
        }
    }
    rows
}

/// Median seconds of forward and backward, with the optimizer's update if asked for; and what its linears did.
fn measure<T: Target>(
    timer: &Timer,
    case: &Case,
    recipe: Option<Recipe>,
    update: bool,
) -> Result<(f64, String), Error> {
    let device = Default::default();
    let config = &case.config;
    let model = Llama::<Backend<T>>::new(config.clone(), &device)?.with_compute_dtype(T::compute_dtype());
    let (model, on) = match recipe {
        None => (model, None),
        Some(recipe) => {
            let mut run = RunConfig::default();
            run.float8.config = Float8Config::new(recipe);
            (
                run.float8(config).convert::<Backend<T>, _>(model).map_err(Float8Error::from)?.0,
                Some(Float8Config::default()),
            )
        }
    };
    set_default_config::<Backend<T>>(&device, on.as_ref())?;
    let [inputs, targets] = ["inputs", "targets"].map(|name| {
        let mut rng = Rng::named(0, name);
        let tokens: Vec<i32> =
            (0..case.batch[0] * case.batch[1]).map(|_| rng.below(config.vocab_size) as i32).collect();
        Tensor::<Backend<T>, 2, Int>::from_data(TensorData::new(tokens, case.batch), &device)
    });
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Some(model);
    let seconds = timer.seconds(T::sync, |_| {
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
    println!("\n{title}");
    println!(
        "{:<14}  {:>10}  {:<20}  {:>9}  {:>10}  {:>7}  GEMMs",
        "model", "tokens", "precision", "ms", "tokens/s", "speedup"
    );
    for Row { model, batch: [b, t], precision, milliseconds, tokens_per_second, speedup, gemms } in rows {
        println!(
            "{model:<14}  {:>10}  {precision:<20}  {milliseconds:>9.2}  {tokens_per_second:>10.0}  {:>7}  {}",
            format!("{b} x {t}"),
            or_dash(*speedup, 2),
            gemms.trim_start_matches("GEMMs: "),
        );
    }
}
