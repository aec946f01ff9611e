//! Gradients applied in backward: the same training, and incompatible settings.

use std::path::Path;

use burn_float8::Recipe;
use models::RunConfig;

use crate::activations::{MOE, config, trained};
use crate::common::{open, run, steps, text};

const IN_BACKWARD: [&str; 3] =
    ["training.activation_checkpointing=full", "training.grad_clip_norm=inf", "optimizer.in_backward=true"];

/// Configurations with these settings that apply gradients in backward, and after it.
fn both(data: &Path, settings: &[&str]) -> [RunConfig; 2] {
    ["true", "false"].map(|in_backward| {
        let in_backward = format!("optimizer.in_backward={in_backward}");
        config(data, &[&IN_BACKWARD[..2], settings, &[&in_backward]].concat())
    })
}

#[test]
fn steps_are_the_same_bits_in_every_run() {
    let data = text();
    let recipes = Recipe::ALL.map(|recipe| format!("float8.recipe={recipe}"));
    let recipes: Vec<[&str; 1]> = recipes.iter().map(|recipe| [&**recipe]).collect();
    let others = [
        &["training.precision=f32", "training.activation_checkpointing=2"][..],
        // The embedding has gradients from the output layer, in chunks, and from the first segment.
        &["training.precision=f32", "model.overrides.tie_word_embeddings=true", "training.loss_chunk=20"],
        &["float8.recipe=delayed", "float8.schedule={ warmup = 2 }", "training.loss_chunk=30"],
        &[MOE, "float8.recipe=mxfp8"],
        &["training.param_dtype=bf16", "optimizer.state_dtype=bf16", "optimizer.weight_decay=5"],
        &["training.param_dtype=bf16", "optimizer.master_weights=true"],
    ];
    for settings in recipes.iter().map(|recipe| &recipe[..]).chain(others) {
        let [within, after] = both(data.path(), settings).map(|config| trained(&config));
        assert!(within == after, "{settings:?}");
    }
    let [within, after] =
        both(data.path(), &["float8.statistics={ every_n_steps = 2 }"]).map(|config| run(&config).unwrap().0);
    assert_eq!(within.report, after.report);
    assert_eq!((within.gemms, within.held_out_loss), (after.gemms, after.held_out_loss));
}

#[test]
fn what_it_excludes_is_said_with_what_to_set() {
    let validated = |settings: &[&str]| {
        let settings: Vec<_> = IN_BACKWARD.iter().chain(settings).map(|setting| setting.to_string()).collect();
        RunConfig::load(None, &settings).unwrap().validate()
    };
    validated(&[]).unwrap();
    for (setting, words) in [
        ("training.activation_checkpointing=none", "set training.activation_checkpointing = \"full\""),
        ("training.grad_accumulation=2", "set training.grad_accumulation = 1, which is 2"),
        ("training.grad_clip_norm=0.5", "set training.grad_clip_norm = inf, which is 0.5"),
    ] {
        let error = validated(&[setting]).unwrap_err().to_string();
        assert!(error.starts_with("optimizer.in_backward = true: ") && error.ends_with(words), "{error}");
    }
}

/// Its gradient is complete only when both layers have added to it.
#[test]
fn a_parameter_of_two_layers_is_refused() {
    let data = text();
    let config = config(data.path(), &IN_BACKWARD);
    let mut run = steps(&config, &open(&config), |mut model| {
        model.layers[1] = model.layers[0].clone();
        model
    });
    let error = run.step(&Default::default()).err().unwrap().to_string();
    assert!(error.starts_with("optimizer.in_backward = true: layers.0."), "{error}");
    assert!(error.contains("is read by several segments"), "{error}");
}

/// Estimated gradients of a run: one layer or two, and the parameters outside of layers.
#[test]
fn gradients_of_some_layers_are_told() {
    let data = text();
    // 4 layers of 4,326,400 parameters: attention's 4 · 512², the MLP's 3 · 512 · 2,134, two norms;
    // 2 · 288 · 512 + 512 outside of layers.
    let model = [
        "model.overrides.num_hidden_layers=4",
        "model.overrides.hidden_size=512",
        "model.overrides.intermediate_size=2134",
        "model.overrides.num_attention_heads=8",
        "model.overrides.num_key_value_heads=8",
        "model.overrides.head_dim=64",
        "training.steps=0",
        "training.eval_batches=1",
        "training.batch_size=1",
    ];
    let (layer, others) = (4 * 512 * 512 + 3 * 512 * 2134 + 2 * 512, 2 * 288 * 512 + 512);
    let gradients = |parameters: usize| format!("gradients {:.2} MiB", (4 * parameters) as f64 / f64::from(1 << 20));
    for (settings, parameters) in [
        (&IN_BACKWARD[..2], 4 * layer + others),
        (&IN_BACKWARD[..], layer + others),
        (&[IN_BACKWARD[1], IN_BACKWARD[2], "training.activation_checkpointing=3"], 3 * layer + others),
    ] {
        let (_, log) = run(&config(data.path(), &[settings, &model].concat())).unwrap();
        assert!(log.contains(&gradients(parameters)), "{settings:?}: {log}");
    }
}
