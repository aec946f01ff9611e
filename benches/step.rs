//! One train step of the debug Decoder, each recipe against the plain backend, in alternating
//! repetitions.
use std::time::Instant;

use burn::backend::{Autodiff, Flex, Wgpu};
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Float8, Float8Config, Float8Stack, Recipe};
use models::Decoder;
use serde::Serialize;

use crate::model::{Training, float8, plain};
use crate::{median, on_devices};

/// One precision on one device.
#[derive(Serialize)]
pub struct Row {
    device: String,
    precision: String,
    /// Median milliseconds of a step.
    ms: f64,
    /// Ratio to the plain backend.
    ratio: f64,
}

type Case = (String, Box<dyn FnMut()>);

fn case<B: AutodiffBackend>(precision: impl Into<String>, model: Decoder<B>) -> Case {
    let mut training = Training::llama(model);
    (precision.into(), Box::new(move || training.step()))
}

fn compare<Plain: AutodiffBackend, Fp8: AutodiffBackend + Float8Stack>(device: &str, repeat: u32, rows: &mut Vec<Row>) {
    let mut cases = vec![case("f32", plain::<Plain>())];
    cases.extend(Recipe::ALL.map(|recipe| case(recipe.to_string(), float8::<Fp8>(Float8Config::new(recipe)))));
    let mut times = vec![vec![]; cases.len()];
    for repetition in 0..repeat + 2 {
        for ((_, step), times) in cases.iter_mut().zip(&mut times) {
            let start = Instant::now();
            step();
            // The first two repetitions compile kernels and create the moments.
            if repetition >= 2 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let medians: Vec<_> = times.into_iter().map(median).collect();
    for ((precision, _), ms) in cases.into_iter().zip(&medians) {
        rows.push(Row { device: device.into(), precision, ms: *ms, ratio: ms / medians[0] });
    }
}

/// Rows of the CPU and, if present, of the wgpu device with this name.
pub fn rows(wgpu: Option<&str>, repeat: u32) -> Vec<Row> {
    let cpu = compare::<Autodiff<Flex>, Float8<Autodiff<Flex>>>;
    on_devices(wgpu, repeat, cpu, compare::<Autodiff<Wgpu>, Float8<Autodiff<Wgpu>>>)
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\ntrain step of the debug Decoder, 8 x 128 tokens: forward, backward, AdamW");
    println!("{:<28}  {:>10}  {:>6}  device", "precision", "ms", "ratio");
    for Row { device, precision, ms, ratio } in rows {
        println!("{precision:<28}  {ms:>10.2}  {ratio:>6.2}  {device}");
    }
}
