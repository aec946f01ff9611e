//! Stopped and resumed runs of difficult models and optimizers.

use crate::common::*;

/// Losses and gradient norms by step, of a run of `config` from its beginning or from `saved`, with
/// this number of threads.
fn lines(config: &RunConfig, saved: Option<SavedRun>, threads: usize) -> Vec<(usize, u64, u64)> {
    let start = Start { is_resumed: saved.is_some(), saved, ..Start::default() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let run = || train::<Decoders, Train>(config, &start, &SelectedDevice::Cpu, &Default::default(), &mut vec![]);
    let steps = pool.install(run).unwrap().steps;
    steps.iter().map(|line| (line.step, line.loss.to_bits(), line.grad_norm.to_bits())).collect()
}

/// Bytes of a tensor file in the checkpoint after `step`.
fn saved_tensors(folder: &Path, step: usize, file: &str) -> Vec<u8> {
    std::fs::read(folder.join(format!("step-{step:09}")).join(file)).unwrap()
}

/// Three steps at once on one thread, and two and one on several: bitwise the same losses, norms,
/// parameters and moments.
fn assert_resumes(settings: &[&str]) {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let [straight, stopped] = ["straight", "stopped"].map(|name| {
        let saved = saved(folder.path().join(name));
        // The learning rates do not depend on the number of steps.
        let fixed = [
            "training.steps=3",
            "training.log_every=1",
            "checkpoint.save_steps=2",
            "generate.max_new_tokens=0",
            "optimizer.warmup_steps=0",
            "optimizer.decay=constant",
            &saved,
        ];
        run_config(data.path(), &[settings, &fixed].concat())
    });
    let expected = lines(&straight, None, 1);
    let mut first = stopped.clone();
    first.training.steps = 2.into();
    let mut whole = lines(&first, None, 3);
    let saved = SavedRun::open(stopped.checkpoint.output_dir.as_deref().unwrap(), Which::Latest).unwrap();
    assert_eq!(saved.step(), 2);
    whole.extend(lines(&stopped, Some(saved), 4));
    assert_eq!(whole, expected, "{settings:?}");
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [a, b] = [&straight, &stopped]
            .map(|config| saved_tensors(config.checkpoint.output_dir.as_deref().unwrap(), 3, file));
        assert!(a == b, "{settings:?}: {file}");
    }
}

/// Flex adds the sum for its gradient's norm on several cores.
#[test]
fn a_run_with_an_embedding_of_8_mi_elements_resumes_bit_for_bit() {
    assert_resumes(&[
        "model.overrides={ vocab_size = 1024, hidden_size = 8192, intermediate_size = 8, num_hidden_layers = 1, \
         num_attention_heads = 2, num_key_value_heads = 1, head_dim = 4, tie_word_embeddings = true }",
        "training.batch_size=1",
        "training.seq_len=8",
        "training.eval_batches=1",
        "checkpoint.save_total_limit=1",
        "training.grad_clip_norm=0.5",
    ]);
}

/// With a margin, the first step has no history and scales differently from later ones, for frozen
/// weights too.
const DELAYED: [&str; 2] = ["float8.recipe=delayed", "float8.delayed_scaling={ margin = 1 }"];

#[test]
fn runs_of_experts_adapters_some_parameters_and_in_bf16_resume_bit_for_bit() {
    let lora = ["lora.rank=3", "lora.dropout=0.2", "training.grad_accumulation=2"];
    let bf16 = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];
    let narrow = ["float8.recipe=delayed", "training.grad_accumulation=2"];
    for settings in [
        &["model.preset=llama3-debug-moe"][..],
        &[&lora[..], &["lora.base=fp8"]].concat(),
        &[&lora[..], &DELAYED, &["optimizer.state_dtype=bf16"]].concat(),
        &[&DELAYED[..], &["training.freeze=[\"embed_tokens\", \"layers.0\"]"]].concat(),
        &["training.freeze=[\"*\", \"!*_proj.weight\", \"layers.1.mlp\"]"],
        &[&narrow[..], &bf16[..1]].concat(),
        &[&narrow[..], &bf16[1..]].concat(),
        &[&narrow[..], &bf16].concat(),
        &[&narrow[..], &[bf16[0], "optimizer.master_weights=true"]].concat(),
    ] {
        assert_resumes(settings);
    }
}

/// Without frozen weights, an evaluation may begin an FP8 step. With frozen weights it must not
/// begin one that the trainer begins again.
#[test]
fn evaluations_change_no_step_of_a_run_of_some_parameters() {
    let data = text();
    let fixed = ["training.freeze=[\"*\", \"!layers.1\"]", "training.log_every=1", "generate.max_new_tokens=0"];
    let of = |eval_every: &str| {
        let config = run_config(data.path(), &[&DELAYED[..], &fixed, &["training.steps=4", eval_every]].concat());
        lines(&config, None, 2)
    };
    assert_eq!(of("training.eval_every=1"), of("training.eval_every=0"));
}
