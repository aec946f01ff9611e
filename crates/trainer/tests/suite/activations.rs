//! Activation checkpointing, gradients applied in backward, and logits in chunks: less memory, the
//! same training.

use crate::common::*;
use crate::watching::recorded;

/// Configuration of a three-layer model on the text in `data`.
fn config(data: &Path, settings: &[&str]) -> RunConfig {
    let fixed = ["model.overrides.num_hidden_layers=3", "training.batch_size=3", "training.grad_clip_norm=inf"];
    run_config(data, &[&fixed, settings].concat())
}

/// Bits of losses, gradient norms and parameters of four steps, after a change of the model.
fn trained(config: &RunConfig, change: fn(Decoder<Train>) -> Decoder<Train>) -> (Vec<u32>, Vec<u32>) {
    let (run, made) = advance(steps(config, &open(config), change), 4);
    let losses = made.into_iter().flat_map(|step| [step.loss, step.grad_norm]);
    (losses.map(|value| value.into_scalar().to_bits()).collect(), parameters(&run.model))
}

const FULL: &str = "training.activation_checkpointing=full";
const IN_BACKWARD: &str = "optimizer.in_backward=true";

#[test]
fn recomputation_and_gradients_in_backward_change_no_bit() {
    let data = text();
    let recipes = Recipe::ALL.map(|recipe| format!("float8.recipe={recipe}"));
    let recipes: Vec<[&str; 1]> = recipes.iter().map(|recipe| [&**recipe]).collect();
    let tied = "model.overrides.tie_word_embeddings=true";
    let (f32, delayed, bf16) = ("training.precision=f32", "float8.recipe=delayed", "training.param_dtype=bf16");
    let others = [
        &[f32][..],
        // The embedding has gradients from the output layer, in chunks, and from the first segment.
        &[f32, tied, "training.loss_chunk=20"],
        &[delayed, tied, "training.grad_accumulation=2"],
        &["training.attn_mask_type=block_causal", "data.packing=whole"],
        &["model.preset=llama3-debug-moe", "float8.recipe=mxfp8"],
        &[delayed, "float8.schedule={ warmup = 2 }", "training.loss_chunk=30"],
        &["float8.filter_fqns=[]", delayed],
        &[bf16, "optimizer.state_dtype=bf16", "optimizer.weight_decay=5"],
        &[bf16, "optimizer.master_weights=true"],
    ];
    for settings in recipes.iter().map(|recipe| &recipe[..]).chain(others) {
        let of = |more: &[&str]| trained(&config(data.path(), &[settings, more].concat()), |model| model);
        let plain = of(&[]);
        assert!(of(&[FULL]) == plain, "{settings:?}");
        // Gradients of micro-batches are added before they are applied.
        if !settings.contains(&"training.grad_accumulation=2") {
            let mode = if settings == [f32] { "training.activation_checkpointing=2" } else { FULL };
            assert!(of(&[mode, IN_BACKWARD]) == plain, "{settings:?} in backward");
        }
    }
}

#[test]
fn an_embedding_may_be_frozen() {
    let data = text();
    let freeze = |mut model: Decoder<Train>| {
        model.embed_tokens = model.embed_tokens.no_grad();
        model
    };
    let full = config(data.path(), &[FULL]);
    let plain = trained(&config(data.path(), &[]), freeze);
    assert!(trained(&full, freeze) == plain && trained(&full, |model| model) != plain);
}

#[test]
fn what_is_recomputed_is_observed_once() {
    let folder = TempDir::new().unwrap();
    let [(plain, statistics), (full, again), (within, last)] = [&[][..], &[FULL], &[FULL, IN_BACKWARD]].map(|mode| {
        let statistics = "float8.statistics={ every_n_steps = 2 }";
        let settings = ["float8.recipe=delayed", statistics, "training.steps=4", "training.grad_clip_norm=inf"];
        let run = folder.path().join(mode.len().to_string());
        let (outcome, records, _) = recorded(&run, &[&settings, mode].concat());
        let health = records.into_iter().map(|record| record.health).filter(|health| !health.is_empty());
        (outcome.report, health.collect::<Vec<_>>())
    });
    assert!(statistics.len() == 2 && again == statistics && last == statistics, "{statistics:?}\n{again:?}");
    assert_eq!(within, full);
    for (layer, plain) in full.layers.iter().zip(&plain.layers) {
        let calls = |layer: &LayerReport| layer.gemms().map(|(_, gemm)| gemm.emulated + gemm.high_precision);
        let ([fprop, dgrad, wgrad], forwards) = (calls(plain), if plain.name == "lm_head" { 1 } else { 2 });
        assert_eq!(calls(layer), [fprop * forwards, dgrad, wgrad], "{}", layer.name);
    }
}

/// Its gradient is complete only when both layers have added to it.
#[test]
fn a_parameter_of_two_layers_is_not_updated_in_backward() {
    let data = text();
    let config = config(data.path(), &[FULL, IN_BACKWARD]);
    let mut run = steps(&config, &open(&config), |mut model| {
        model.layers[1] = model.layers[0].clone();
        model
    });
    let error = run.step(&Default::default()).err().unwrap().to_string();
    assert!(error.starts_with("optimizer.in_backward = true: layers.0."), "{error}");
    assert!(error.contains("is read by several segments"), "{error}");
}

#[test]
fn logits_in_chunks_are_the_same_training() {
    let data = text();
    let fixed = ["training.steps=4", "training.log_every=1", "generate.max_new_tokens=0"];
    for settings in [
        &["training.precision=f32", "model.overrides.tie_word_embeddings=true"][..],
        &["float8.recipe=rowwise", FULL],
        &["training.precision=f32", "training.attn_mask_type=block_causal", "data.packing=whole"],
    ] {
        let [whole, parts] = [&[][..], &["training.loss_chunk=11"]].map(|chunk| {
            let (outcome, _) = run(&config(data.path(), &[&fixed, settings, chunk].concat())).unwrap();
            let lines = outcome.steps.iter().flat_map(|line| [line.loss, line.grad_norm]);
            lines.chain(outcome.validation_loss).collect::<Vec<f64>>()
        });
        assert!(whole.len() == 9 && whole != parts, "{settings:?}: nothing was cut");
        for (whole, part) in whole.iter().zip(&parts) {
            assert!((whole - part).abs() <= 2e-6 * whole, "{settings:?}: {whole} {part}");
        }
    }
}
