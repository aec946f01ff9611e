//! A decoder whose linears, embedding and output layer ranks divide.
use std::collections::BTreeMap;

use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{Sharded, TensorParallel};
use models::{CausalLmExt, Decoder, DecoderConfig, tensor_plan};
use ranks::{B, gradients};

use super::world;

/// Sequences, and tokens in each.
const BATCH: [usize; 2] = [2, 256];

/// Eight heads and four key heads; parts of widths and tokens are multiples of 128 on four ranks.
pub(super) fn config(preset: &str) -> DecoderConfig {
    let mut config = DecoderConfig::preset(preset).unwrap();
    let dims = &mut config.dims;
    (dims.vocab_size, dims.hidden_size, dims.intermediate_size, dims.num_layers) = (512, 512, 512, 2);
    (dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.max_seq_len) = (8, 4, 128, 256);
    config
}

pub(super) fn batch(step: usize) -> [Tensor<B, 2, Int>; 2] {
    let count = BATCH[0] * BATCH[1];
    let token = |i: usize| ((i * i * 31 + 17 * i + step * 13) % 512) as i32;
    [0, 1].map(|shift| {
        let tokens: Vec<_> = (shift..count + shift).map(token).collect();
        Tensor::from_data(TensorData::new(tokens, BATCH), &Default::default())
    })
}

/// Two architectures in high precision, and one in each recipe.
pub(super) fn runs() -> Vec<(&'static str, Option<Recipe>)> {
    // Linears without a recipe are in high precision.
    burn_float8::set_default_config::<B>(&Default::default(), None).unwrap();
    let in_recipes = Recipe::ALL.map(|recipe| ("llama3-debug", Some(recipe)));
    [("llama3-debug", None), ("qwen3-debug", None)].into_iter().chain(in_recipes).collect()
}

pub(super) fn decoder(preset: &str, recipe: Option<Recipe>) -> Decoder<B> {
    let model = Decoder::<B>::new(config(preset), &Default::default()).unwrap().init_weights(0);
    match recipe {
        Some(recipe) => Float8Config::new(recipe).apply(model).unwrap().0,
        None => model,
    }
}

/// Largest relative differences between a model and its parts.
pub(super) struct Bounds {
    loss: f32,
    /// Of the norm of a parameter's gradient.
    gradients: f64,
    what: String,
}

impl Bounds {
    pub(super) fn of(recipe: Option<Recipe>, what: String) -> Self {
        // Sums in another order move FP8 codes to their neighbours.
        let (loss, gradients) = if recipe.is_some() { (1e-4, 0.15) } else { (1e-6, 1e-5) };
        Self { loss, gradients, what }
    }

    pub(super) fn check_loss(&self, found: f32, expected: f32) {
        let Self { loss, what, .. } = self;
        assert!((found - expected).abs() < loss * expected, "{what}: {found}, not {expected}");
    }

    /// Compares gradients with their places in the whole model's.
    pub(super) fn check_gradients(
        &self,
        part: &Decoder<B>,
        grads: GradientsParams,
        of_whole: &BTreeMap<String, Vec<f32>>,
    ) {
        let Self { gradients: bound, what, .. } = self;
        let mut own = gradients(part, grads);
        for parameter in Sharded::parameters::<B, _>(part) {
            let (name, all) = (&parameter.name, &of_whole[&parameter.name]);
            let width: usize = parameter.shape[1..].iter().product();
            let [top, bottom] = parameter.rows.unwrap_or([0, parameter.shape[0]]);
            let [left, right] = parameter.cols.unwrap_or([0, width]);
            let expected: Vec<_> =
                (top..bottom).flat_map(|row| &all[row * width + left..row * width + right]).copied().collect();
            let mut own = own.remove(name).unwrap();
            if parameter.is_shard {
                // Its padding.
                own.truncate(expected.len());
            }
            assert_eq!(own.len(), expected.len(), "{what} {name}");
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
            let far = norm(&mut own.iter().zip(&expected).map(|(a, b)| a - b));
            let far = (far / norm(&mut expected.iter().copied())).sqrt();
            assert!(far <= *bound, "{what}: {name} is off by {far} of its norm");
        }
    }
}

/// Loss and gradients by name.
pub fn has_the_gradients_of_one_rank() {
    let comm = world();
    for (preset, recipe) in runs() {
        let (whole, [inputs, targets]) = (decoder(preset, recipe), batch(0));
        let loss = whole.loss(inputs.clone(), targets.clone());
        let expected = loss.clone().into_scalar();
        let of_whole = gradients(&whole, GradientsParams::from_grads(loss.backward(), &whole));

        let plan = tensor_plan(&config(preset).dims);
        let (part, parallel) = TensorParallel::apply(decoder(preset, recipe), &comm, &plan).unwrap();
        let loss = part.loss(inputs, targets);
        let found = loss.clone().into_scalar();
        let mut grads = GradientsParams::from_grads(loss.backward(), &part);
        parallel.reduce_gradients(&part, &mut grads).unwrap();
        let bounds = Bounds::of(recipe, format!("{preset} {recipe:?}"));
        bounds.check_loss(found, expected);
        bounds.check_gradients(&part, grads, &of_whole);
    }
}
