//! A decoder whose linears, embedding and output layer ranks divide.
use std::collections::BTreeMap;

use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_float8::shard_hooks::visit_params;
use burn_float8::{Float8Config, Recipe};
use float8_shard::TensorParallel;
use models::{CausalLmExt, Decoder, DecoderConfig, tensor_plan};
use ranks::B;

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

/// Gradients by parameter.
pub(super) fn gradients(model: &Decoder<B>, grads: &mut GradientsParams) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut found = BTreeMap::new();
    visit_params::<B, _>(model, |param| {
        let gradient = grads.remove::<<B as burn::tensor::backend::AutodiffBackend>::InnerBackend, 1>(param.id);
        let gradient = gradient.expect("every parameter has one");
        found.insert(param.name(), (param.shape.to_vec(), gradient.into_data().to_vec().unwrap()));
    });
    found
}

/// Loss and gradients by name.
pub fn has_the_gradients_of_one_rank() {
    let comm = world();
    let device = Default::default();
    let (ranks, rank) = (comm.world_size(), comm.rank());
    // Linears without a recipe are in high precision.
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let mut runs = vec![("llama3-debug", None), ("qwen3-debug", None)];
    runs.extend(Recipe::ALL.map(|recipe| ("llama3-debug", Some(recipe))));
    for (preset, recipe) in runs {
        let build = || {
            let model = Decoder::<B>::new(config(preset), &device).unwrap().init_weights(0);
            match recipe {
                Some(recipe) => Float8Config::new(recipe).apply(model).unwrap().0,
                None => model,
            }
        };
        let (whole, [inputs, targets]) = (build(), batch(0));
        let loss = whole.loss(inputs.clone(), targets.clone());
        let expected = loss.clone().into_scalar();
        let of_whole = gradients(&whole, &mut GradientsParams::from_grads(loss.backward(), &whole));

        let plan = tensor_plan(&config(preset).dims);
        let (part, parallel) = TensorParallel::apply(build(), &comm, &plan).unwrap();
        let loss = part.loss(inputs, targets);
        let found = loss.clone().into_scalar();
        let mut grads = GradientsParams::from_grads(loss.backward(), &part);
        parallel.reduce_gradients(&part, &mut grads).unwrap();
        // Sums in another order move FP8 codes to their neighbours.
        let [of_loss, bound] = if recipe.is_some() { [1e-4, 0.15] } else { [1e-6, 1e-5] };
        assert!((found - expected).abs() < of_loss as f32 * expected, "{preset} {recipe:?}: {found}, not {expected}");
        for (name, (shape, own)) in gradients(&part, &mut grads) {
            let (whole, all) = &of_whole[&name];
            let axis = (0..shape.len()).find(|axis| shape[*axis] != whole[*axis]);
            let rows = whole[0];
            let cols = all.len() / rows;
            let is_own = |i: usize| match axis {
                None => true,
                Some(0) => i / cols / (rows / ranks) == rank,
                Some(_) => i % cols / (cols / ranks) == rank,
            };
            let expected: Vec<_> = (0..all.len()).filter(|i| is_own(*i)).map(|i| all[i]).collect();
            assert_eq!(own.len(), expected.len(), "{name}");
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let far = norm(&mut own.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied());
            assert!(far <= bound, "{preset} {recipe:?}: {name} is off by {far} of its norm");
        }
    }
}
