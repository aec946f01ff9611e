//! Activation checkpointing and logits in chunks: less memory, the same training.

use crate::common::*;
use burn_float8::report::Report;

pub(crate) const MOE: &str = "model.preset=llama3-debug-moe";

/// Configuration of a three-layer model on the text in `data`.
pub(crate) fn config(data: &Path, settings: &[&str]) -> RunConfig {
    let fixed = [
        "model.overrides.num_hidden_layers=3",
        "training.steps=4",
        "training.batch_size=3",
        "training.log_every=1",
        "generate.max_new_tokens=0",
    ];
    run_config(data, &[&fixed, settings].concat())
}

/// Bits of losses, gradient norms and parameters of four steps.
pub(crate) fn trained(config: &RunConfig) -> (Vec<u32>, Vec<u32>) {
    trained_with(config, |model| model)
}

/// The same after changing the model.
pub(crate) fn trained_with(config: &RunConfig, change: fn(Decoder<Train>) -> Decoder<Train>) -> (Vec<u32>, Vec<u32>) {
    let data = open(config);
    let (mut run, mut losses) = (steps(config, &data, change), vec![]);
    for _ in 0..4 {
        let step = run.step(&Default::default()).unwrap();
        losses.extend([step.loss, step.grad_norm].map(|value| value.into_scalar().to_bits()));
    }
    (losses, parameters(&run.model))
}

/// Report of the linears in a run, with the number of forwards corrected for recomputation.
fn reported(config: &RunConfig, recomputed: bool) -> (Report, Vec<Value>) {
    let folder = TempDir::new().unwrap();
    let mut config = config.clone();
    config.checkpoint.output_dir = Some(folder.path().join("run"));
    let (outcome, _) = run(&config).unwrap();
    let mut report = outcome.report;
    for layer in report.layers.iter_mut().filter(|layer| recomputed && layer.name != "lm_head") {
        let fprop = &mut layer.fprop;
        (fprop.emulated, fprop.high_precision) = (fprop.emulated / 2, fprop.high_precision / 2);
    }
    let lines = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let statistics = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["health"].clone());
    (report, statistics.filter(|statistics| !statistics.is_null()).collect())
}

#[test]
fn recomputed_activations_are_the_same_bits_in_every_recipe() {
    let data = text();
    for recipe in Recipe::ALL {
        let recipe = format!("float8.recipe={recipe}");
        let plain = trained(&config(data.path(), &[&recipe]));
        for mode in ["full", "2"] {
            let mode = format!("training.activation_checkpointing={mode}");
            assert!(trained(&config(data.path(), &[&recipe, &mode])) == plain, "{recipe} {mode}");
        }
    }
}

#[test]
fn recomputed_activations_are_the_same_bits_in_every_run() {
    let data = text();
    let schedule = "float8.schedule={ warmup = 2 }";
    for settings in [
        &["training.precision=f32"][..],
        &["training.precision=f32", "model.overrides.tie_word_embeddings=true", "training.grad_accumulation=2"],
        &["model.overrides.tie_word_embeddings=true", "training.grad_accumulation=2", "float8.recipe=delayed"],
        &["training.attn_mask_type=block_causal", "data.packing=whole"],
        &[MOE, "float8.recipe=mxfp8"],
        &[schedule, "float8.recipe=rowwise"],
        &["float8.filter_fqns=[]", "float8.recipe=delayed"],
    ] {
        let plain = trained(&config(data.path(), settings));
        let full = [settings, &["training.activation_checkpointing=full"]].concat();
        assert!(trained(&config(data.path(), &full)) == plain, "{settings:?}");
    }
}

#[test]
fn an_embedding_may_be_frozen() {
    let data = text();
    let freeze = |mut model: Decoder<Train>| {
        model.embed_tokens = model.embed_tokens.no_grad();
        model
    };
    let plain = trained_with(&config(data.path(), &[]), freeze);
    let full = config(data.path(), &["training.activation_checkpointing=full"]);
    assert!(trained_with(&full, freeze) == plain && trained(&full) != plain);
}

#[test]
fn what_is_recomputed_is_observed_once() {
    let data = text();
    let settings = ["float8.recipe=delayed", "float8.statistics={ every_n_steps = 2 }"];
    let (plain, statistics) = reported(&config(data.path(), &settings), false);
    let full = [&settings[..], &["training.activation_checkpointing=full"]].concat();
    let (report, again) = reported(&config(data.path(), &full), true);
    assert!(statistics.len() == 2 && again == statistics, "{statistics:?}\n{again:?}");
    for (layer, plain) in report.layers.iter().zip(&plain.layers) {
        for ((_, gemm), (_, plain)) in layer.gemms().into_iter().zip(plain.gemms()) {
            assert_eq!((gemm.emulated, gemm.high_precision), (plain.emulated, plain.high_precision), "{}", layer.name);
        }
    }
}

#[test]
fn logits_in_chunks_are_the_same_training() {
    let data = text();
    for settings in [
        &["training.precision=f32"][..],
        &["training.precision=f32", "model.overrides.tie_word_embeddings=true"],
        &["float8.recipe=rowwise", "training.activation_checkpointing=full"],
        &["training.precision=f32", "training.attn_mask_type=block_causal", "data.packing=whole"],
    ] {
        let (whole, _) = run(&config(data.path(), settings)).unwrap();
        let chunked = [settings, &["training.loss_chunk=11"]].concat();
        let (parts, _) = run(&config(data.path(), &chunked)).unwrap();
        let all = |outcome: &trainer::job::Outcome| {
            let lines = outcome.steps.iter().flat_map(|line| [line.loss, line.grad_norm]);
            lines.chain(outcome.held_out_loss).collect::<Vec<f64>>()
        };
        let (whole, parts) = (all(&whole), all(&parts));
        assert_eq!((whole.len(), parts.len()), (9, 9));
        for (whole, part) in whole.iter().zip(&parts) {
            assert!((whole - part).abs() <= 2e-6 * whole, "{settings:?}: {whole} {part}");
        }
        assert_ne!(whole, parts, "{settings:?}: nothing was cut");
    }
}

#[test]
fn modes_are_read_and_written() {
    for (value, written) in [("none", "\"none\""), ("full", "\"full\""), ("1", "1"), ("4", "4")] {
        let config = RunConfig::load(None, &[format!("training.activation_checkpointing={value}")]).unwrap();
        let line = format!("\nactivation_checkpointing = {written}\n");
        assert!(config.to_toml().unwrap().contains(&line), "{value}");
    }
}
