//! One train step of the debug Decoder, each recipe against the plain backend, in alternating
//! repetitions.
use std::time::Instant;

use benches::{median, table::Table};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Float8, Float8Config, Recipe};
use models::Decoder;
use serde_json::json;

use crate::model::{Training, float8, plain};

type Case = (String, Box<dyn FnMut()>);

fn case<B: AutodiffBackend>(precision: impl Into<String>, model: Decoder<B>) -> Case {
    let mut training = Training::llama(model);
    (precision.into(), Box::new(move || training.step()))
}

/// Table by precision.
pub fn table(repeat: u32) -> Table {
    let mut cases = vec![case("f32", plain::<Autodiff<Flex>>())];
    let of = |recipe: Recipe| case(recipe.to_string(), float8::<Float8<Autodiff<Flex>>>(Float8Config::new(recipe)));
    cases.extend(Recipe::ALL.map(of));
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
    let title = "train step of the debug Decoder on the CPU, 8 x 128 tokens: forward, backward, AdamW";
    let mut table = Table::new(title);
    for ((precision, _), ms) in cases.into_iter().zip(&medians) {
        table.rows.push(json!({ "precision": precision, "ms": ms, "ratio": ms / medians[0] }));
    }
    table
}
