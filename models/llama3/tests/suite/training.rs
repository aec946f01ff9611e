//! Complete runs on small text: losses fall and are reproducible, precisions agree, GEMMs are
//! counted, invalid runs are refused.

use llama3::RunConfig;
use train::DataError;
use train::RunError;
use train::config::ConfigError;
use train::job::Outcome;
use train::{ProgressLine, TensorFilesError, Tokenizer};

use crate::common::{
    cause, hf_json, open, refuses, run, run_config as config, stored_tensors, text, tiny, tiny_with, write_json,
    write_safetensors,
};

#[test]
fn losses_fall_repeat_and_agree_between_precisions() {
    let data = text();
    let config = |precision: &str| {
        let precision = format!("training.precision={precision}");
        config(data.path(), &[&precision, "training.steps=60", "optimizer.lr=1e-2"])
    };
    let (fp8, _) = run(&config("fp8")).unwrap();
    let (again, _) = run(&config("fp8")).unwrap();
    let losses = |outcome: &Outcome| -> Vec<_> {
        outcome.steps.iter().map(|line| (line.step, line.loss, line.grad_norm)).collect()
    };
    assert_eq!(losses(&fp8), losses(&again));
    assert_eq!((fp8.held_out_loss, &fp8.sample), (again.held_out_loss, &again.sample));
    assert!(fp8.steps[0].loss > 5.0 && fp8.held_out_loss.unwrap() < 2.0, "{fp8:?}");
    for precision in ["f32", "bf16"] {
        let (other, _) = run(&config(precision)).unwrap();
        let ratio = other.held_out_loss.unwrap() / fp8.held_out_loss.unwrap();
        assert!((ratio - 1.0).abs() < 0.05, "{precision}: {:?} {:?}", other.held_out_loss, fp8.held_out_loss);
    }
}

#[test]
fn the_log_has_every_part_and_the_gemms_are_counted() {
    let data = text();
    let (outcome, log) = run(&config(data.path(), &[])).unwrap();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines[0], "device: cpu  precision: fp8  compute dtype: f32  attention: tiles");
    assert!(lines[1] == "model: llama3 debug  parameters: 69,360", "{}", lines[1]);
    // 16 bytes for each of 69,360 parameters.
    let held = " MiB (parameters 0.26 MiB, gradients 0.26 MiB, AdamW's moments 0.53 MiB)";
    assert!(lines[2].starts_with("memory: a step takes about ") && lines[2].ends_with(held), "{}", lines[2]);
    assert!(lines[3].starts_with("data: 10 files (10 text)  tokens: 1"), "{}", lines[3]);
    let tokens = open(&config(data.path(), &[])).size().train_tokens;
    let sequences = (tokens - 1).div_ceil(24);
    let epoch = format!("epoch: {sequences} sequences, {:.1} steps  documents: ", sequences as f64 / 4.0);
    assert!(lines[4].starts_with(&epoch), "{} {epoch}", lines[4]);
    assert_eq!(lines[5], "warm-up: 20 of 12 steps, more than a tenth (optimizer.warmup_steps)");
    let applied = "Applied Float8: recipe=tensorwise, 14 of 15 linears; skipped: lm_head";
    assert!(lines[6].starts_with(applied), "{}", lines[6]);
    let steps: Vec<_> = outcome.steps.iter().map(|line| line.step).collect();
    assert_eq!(steps, [1, 5, 10, 12]);
    assert_eq!(lines[7], outcome.steps[0].to_string());
    assert!(lines[11].starts_with("held-out loss: "), "{}", lines[11]);
    assert_eq!(lines[12], "sample:");
    // 12 steps of three GEMMs; evaluation and sample do not count.
    let gemms = |linears: u64| linears * 12 * 3;
    assert_eq!(outcome.gemms.native, 0);
    assert_eq!(outcome.gemms.emulated, gemms(14));
    assert_eq!(outcome.gemms.high_precision, gemms(1));
    assert_eq!(outcome.report.totals(), outcome.gemms);
    assert_eq!(lines.last().unwrap(), &outcome.gemms.to_string());
    // Evaluations during training do not count either. The last call of each GEMM belongs to a
    // step: 4 sequences of 24 tokens.
    let (with, log) = run(&config(data.path(), &["training.eval_every=3"])).unwrap();
    assert_eq!(with.gemms, outcome.gemms);
    assert_eq!(log.matches("  held-out loss: ").count(), 3, "{log}");
    assert_eq!(with.report.layers[0].fprop.operands[0].size.unwrap().rows, 4 * 24);
    // A run in f32 prints nothing about FP8.
    let (_, log) = run(&config(data.path(), &["training.precision=f32", "training.steps=1"])).unwrap();
    assert!(!log.contains("no linear was converted") && !log.contains("GEMMs"), "{log}");
}

#[test]
fn a_run_may_be_as_long_as_its_data() {
    let data = text();
    let (outcome, log) = run(&config(data.path(), &["training.steps=1.5 epochs", "training.batch_size=11"])).unwrap();
    let sequences = (open(&config(data.path(), &[])).size().train_tokens - 1).div_ceil(24) as f64;
    let steps = (1.5 * sequences / 11.0).ceil() as usize;
    assert_eq!(outcome.steps.last().unwrap().step, steps);
    let first = (sequences / 11.0).ceil() as usize;
    let next = first * 11 - sequences as usize;
    let ended = format!("step: {first:2}  epoch 1 has ended; sequences of the next one in this step: {next}\n");
    assert!(next > 0 && log.contains(&ended), "{log}");
    assert_eq!(log.matches("has ended").count(), 1, "{log}");
    // The number of steps, and that none would run in FP8, is known only after reading the data.
    let error =
        run(&config(data.path(), &["training.steps=1 epoch", "float8.schedule={ warmup = 5000 }"])).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(ConfigError::Value { key: "float8.schedule", .. })), "{error}");
    let source = format!("{{ paths = [{:?}], weight = 1.0 }}", data.path());
    let weights = format!("data.sources=[{source}, {source}]");
    let mut weighted = config(data.path(), &["training.steps=1 epoch", &weights]);
    weighted.data.paths.clear();
    let error = run(&weighted).unwrap_err();
    assert!(error.to_string().starts_with("training.steps = 1 epoch: sources with weights have epochs"), "{error}");
}

/// Conversations: the sample is an answer, and only some tokens count in the loss.
#[test]
fn a_run_on_conversations_says_and_samples_what_it_sees() {
    let data = tempfile::tempdir().unwrap();
    let template = data.path().join("chat.jinja");
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(&template, source).unwrap();
    let turn = |answer: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "hi"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
        ) + "\n"
    };
    let lines: String =
        (0..60).map(|i| turn(if i % 10 == 0 { "a long answer that does not fit" } else { "ok" })).collect();
    let file = data.path().join("chats.jsonl");
    std::fs::write(&file, lines).unwrap();
    let template = format!("data.chat_template={:?}", template);
    let settings = ["training.steps=2", &template, "data.held_out_fraction=0.2", "generate.prompt=hello"];
    let mut config = config(&file, &settings);
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains(&format!("sample:\nhello\n{}", outcome.sample)), "{log}");
    assert!(log.contains("  longer than training.seq_len, and cut: "), "{log}");
    let targets = log.split("  targets: ").nth(1).unwrap();
    let [targets, tokens] =
        [0, 2].map(|word| targets.split(' ').nth(word).unwrap().replace(',', "").parse::<u64>().unwrap());
    assert!(0 < targets && targets < tokens, "{log}");
    let prompt = config.text().unwrap().prompt(&config.generate.prompt, true).unwrap();
    assert_eq!(Tokenizer::bytes().decode(&prompt).unwrap(), "<user>hello<assistant>");
    // If the template refuses the prompt, only the sample fails.
    let strict = data.path().join("strict.jinja");
    std::fs::write(
        &strict,
        format!("{{% if messages[0].content == 'hello' %}}{{{{ raise_exception('no hello') }}}}{{% endif %}}{source}"),
    )
    .unwrap();
    let template = config.data.chat_template.replace(strict);
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains("sample: left out: ") && log.contains("no hello") && outcome.sample.is_empty(), "{log}");
    // Without sampling, the prompt does not matter.
    config.generate.max_new_tokens = 0;
    config.generate.prompt = "hello ".repeat(10_000);
    run(&config).unwrap();
    (config.generate.max_new_tokens, config.generate.prompt) = (8, "hello".into());
    config.data.chat_template = template;
    // Also for a chat model that is trained on text.
    let text = text();
    config.data.paths = vec![text.path().into()];
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains(&format!("sample:\nhello\n{}", outcome.sample)), "{log}");
}

/// Errors of a model come before its data is read, which does not exist here.
#[test]
fn a_model_is_checked_before_the_data_is_read() {
    let nowhere = std::path::Path::new("/no/such/data");
    let refused = |settings: &[&str]| run(&config(nowhere, settings)).unwrap_err();
    assert!(refused(&[]).is::<DataError>(), "so that the others come first");
    let error = refused(&["float8.filter_fqns=['no_such_layer']"]);
    assert!(error.to_string().contains("no_such_layer"), "{error}");
    // Its parameters need 15 TB.
    let mut huge = config(nowhere, &["data.tokenizer=bytes"]);
    huge.model = Default::default();
    (huge.model.preset, huge.model.num_layers) = (Some("405b".into()), Some(1200));
    let error = run(&huge).unwrap_err().to_string();
    assert!(error.contains("the model takes at least") == cfg!(target_os = "linux"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = config(nowhere, &[]);
    checkpoint.model = Default::default();
    checkpoint.data.tokenizer = Some("bytes".into());
    checkpoint.model.hf_path = Some(dir.path().into());
    write_json(&dir.path().join("config.json"), &hf_json(&tiny()));
    let mut tensors = stored_tensors(&tiny(), 1);
    tensors.remove(3);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors);
    let error = run(&checkpoint).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(TensorFilesError::Missing { .. })), "{error}");
    for tokenizer in [Some("bytes".into()), None] {
        checkpoint.data.tokenizer = tokenizer;
        checkpoint.model.hf_path = Some("/nope".into());
        let error = run(&checkpoint).unwrap_err();
        assert_eq!(error.to_string(), "there is no folder /nope");
    }
}

#[test]
fn accumulated_micro_batches_are_one_batch() {
    // The whole text is one window, so every batch is the same.
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("a"), "x".repeat(200)).unwrap();
    let first = |settings: &[&str]| {
        let precision = ["training.precision=f32", "training.steps=1", "data.held_out_fraction=0.5"];
        let (outcome, _) = run(&config(data.path(), &[&precision, settings].concat())).unwrap();
        (outcome.steps[0].loss, outcome.steps[0].grad_norm, outcome.held_out_loss)
    };
    let whole = first(&["training.batch_size=4"]);
    let parts = first(&["training.batch_size=1", "training.grad_accumulation=4"]);
    for (a, b) in [(whole.0, parts.0), (whole.1, parts.1)] {
        assert!((a - b).abs() < 1e-4 * a, "{whole:?} {parts:?}");
    }
}

#[test]
fn a_checkpoint_is_trained_on() {
    let data = text();
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(&tiny()));
    write_safetensors(&dir.path().join("model.safetensors"), &stored_tensors(&tiny(), 1));
    let mut config = config(data.path(), &["training.steps=0", "generate.max_new_tokens=0"]);
    config.model = Default::default();
    config.model.hf_path = Some(dir.path().into());
    let error = run(&config).unwrap_err();
    assert!(error.to_string().contains(&format!("no tokenizer in {}", dir.path().display())), "{error}");
    config.data.tokenizer = Some("bytes".into());
    let (loaded, log) = run(&config).unwrap();
    assert!(log.contains("learning rate: 2e-5, the default for fine-tuning"), "{log}");
    assert!(log.contains(&dir.path().display().to_string()) && !log.contains("sample"));
    assert!(loaded.steps.is_empty() && loaded.sample.is_empty());
    config.training.seed = 1;
    assert_eq!(run(&config).unwrap().0.held_out_loss, loaded.held_out_loss, "the checkpoint decides, not the seed");
    config.training.steps = 2.into();
    let (trained, _) = run(&config).unwrap();
    assert_eq!(trained.steps.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2]);
    assert!(trained.held_out_loss < loaded.held_out_loss, "{:?} {:?}", trained.held_out_loss, loaded.held_out_loss);
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(matches!(cause(run(&config)), TensorFilesError::NoTensors { .. }));
}

/// A checkpoint's tokenizer is used in training and in the sample, regardless of a preset's.
#[test]
fn a_checkpoint_brings_its_tokenizer() {
    let (data, dir) = (text(), tempfile::tempdir().unwrap());
    let dims = tiny_with(|dims| dims.vocab_size = 1008);
    write_json(&dir.path().join("config.json"), &hf_json(&dims));
    write_safetensors(&dir.path().join("model.safetensors"), &stored_tensors(&dims, 1));
    let vectors = concat!(env!("CARGO_MANIFEST_DIR"), "/../train/tests/vectors/tokenizer.json");
    std::fs::copy(vectors, dir.path().join("tokenizer.json")).unwrap();
    let mut config = config(data.path(), &["training.steps=1", "data.held_out_fraction=0.5"]);
    config.model = Default::default();
    config.model.hf_path = Some(dir.path().into());

    let (own, log) = run(&config).unwrap();
    let tokens = config
        .open_data(&config.text().unwrap(), &ProgressLine::hidden(), &mut std::io::sink())
        .unwrap()
        .size()
        .train_tokens;
    let bytes = open(&config).size().train_tokens;
    assert!(tokens < bytes);
    assert!(log.contains("tokenizer: tokenizer.json, 1001 tokens"), "{log}");
    config.data.tokenizer = Some("bytes".into());
    let (other, log) = run(&config).unwrap();
    assert!(log.contains("tokenizer: bytes, 257 tokens"), "{log}");
    assert_ne!(own.held_out_loss, other.held_out_loss);

    // The text has tokens from 288 on.
    config.data.tokenizer = None;
    write_json(&dir.path().join("config.json"), &hf_json(&tiny()));
    refuses(run(&config), "is none of the model, whose vocabulary has 288");
    // A preset accepts a tokenizer by name.
    config.model = Default::default();
    (config.model.preset, config.model.vocab_size) = (Some("debug".into()), Some(1008));
    config.data.tokenizer = Some(dir.path().display().to_string());
    run(&config).unwrap();
    config.data.tokenizer = Some(dir.path().join("none.json").display().to_string());
    refuses(run(&config), "none.json");
}

#[test]
fn a_tied_model_trains_in_fp8() {
    let data = text();
    let (outcome, log) = run(&config(data.path(), &["model.tie_word_embeddings=true"])).unwrap();
    assert!(log.contains("Applied Float8: recipe=tensorwise, 14 of 14 linears"), "{log}");
    assert!(outcome.steps.last().unwrap().loss < outcome.steps[0].loss);
}

#[test]
fn runs_that_cannot_be_are_refused() {
    let data = text();
    let refused = |settings: &[&str]| run(&config(data.path(), settings)).unwrap_err();
    let error = refused(&["model.vocab_size=256"]);
    let expected =
        "bytes: bos_token of each text is token 256 (\"\"), which is none of the model, whose vocabulary has 256";
    assert_eq!(error.to_string(), expected);
    let error = refused(&["model.vocab_size=32769"]);
    assert!(error.to_string().starts_with("the model has 32769 tokens, and the tokenizer would be `bytes`"), "{error}");
    let error = refused(&["training.seq_len=2000"]);
    assert!(matches!(error.downcast_ref(), Some(ConfigError::Value { key: "training.seq_len", .. })), "{error}");
    let error = refused(&["model.max_seq_len=30", "generate.max_new_tokens=100"]);
    let expected = "generate.max_new_tokens = 100: with a prompt of 16 tokens exceeds the model's 30 positions";
    assert_eq!(error.to_string(), expected);
    let error = refused(&["generate.max_new_tokens=9000000000000000000"]);
    assert!(matches!(error.downcast_ref(), Some(ConfigError::Value { key: "generate.max_new_tokens", .. })), "{error}");
    let error = refused(&["training.batch_size=5000"]);
    assert!(matches!(error.downcast_ref(), Some(DataError::TooFewTokens { batch_size: 5000, .. })), "{error}");
    let error = refused(&["training.precision=f32", "training.compute_dtype=bf16"]);
    assert_eq!(error.to_string(), "training.compute_dtype = bf16: precision f32 computes in f32");
    let error = refused(&["float8.filter_fqns=['no_such_layer']"]);
    assert!(error.to_string().contains("no_such_layer"), "{error}");
    let error = refused(&["optimizer.lr=1e30", "training.max_norm=inf", "training.log_every=1"]);
    assert!(matches!(error.downcast_ref(), Some(RunError::Diverged(_))), "{error}");
    // The loss of the only step is finite, but the updated parameters are not.
    let error = refused(&["optimizer.lr=1e300", "training.steps=1"]);
    assert!(
        matches!(error.downcast_ref(), Some(RunError::HeldOutDiverged { steps: 1, loss }) if !loss.is_finite()),
        "{error}"
    );
    assert!(error.to_string().contains("held-out loss = "), "{error}");
}

/// The debug preset on this crate's sources with the same seed and batches: the final loss of MXFP8
/// equals f32's within 2 %. The report shows that every GEMM of its 28 linears ran in FP8, with
/// power-of-two scales.
#[test]
fn mxfp8_ends_within_two_percent_of_f32() {
    const STEPS: u64 = 150;
    let train = |settings: [&str; 2]| {
        let common = [
            "float8.strict=true",
            "training.steps=150",
            "training.batch_size=4",
            "training.seq_len=64",
            "training.eval_batches=16",
            "generate.max_new_tokens=0",
        ];
        let settings: Vec<_> = common.iter().chain(&settings).map(|s| s.to_string()).collect();
        let mut config = RunConfig::load(None, &settings).unwrap();
        config.data.paths = vec![concat!(env!("CARGO_MANIFEST_DIR"), "/src").into()];
        run(&config).unwrap().0
    };
    let f32 = train(["training.precision=f32", "float8.recipe=mxfp8"]);
    assert_eq!(f32.gemms.native + f32.gemms.emulated, 0);
    let mx = train(["training.precision=fp8", "float8.recipe=mxfp8"]);
    println!("held-out loss: f32 {:?}, mxfp8 {:?}", f32.held_out_loss, mx.held_out_loss);
    assert!(f32.held_out_loss.unwrap() < f32.steps[0].loss - 2.0, "f32 has learned: {f32:?}");
    let ratio = mx.held_out_loss.unwrap() / f32.held_out_loss.unwrap();
    assert!((ratio - 1.0).abs() < 0.02 && ratio != 1.0, "{:?} {:?}", mx.held_out_loss, f32.held_out_loss);

    mx.report.verify().unwrap();
    let layers: Vec<_> = mx.report.layers.iter().filter(|layer| layer.name != "lm_head").collect();
    assert_eq!(layers.len(), 28);
    for layer in layers {
        assert_eq!(layer.policy, "mxfp8", "{}", layer.name);
        for ((gemm, ran), calls) in layer.gemms().into_iter().zip([STEPS; 3]) {
            assert_eq!((ran.native + ran.emulated, ran.high_precision), (calls, 0), "{} {gemm}", layer.name);
            for operand in &ran.operands {
                let scale = operand.scale.unwrap();
                assert!(scale > 0.0 && scale.to_bits() & 0x007f_ffff == 0, "{} {gemm}: {scale}", layer.name);
            }
        }
    }
}
