//! Complete runs on small text: losses fall and are reproducible, precisions agree, GEMMs are
//! counted, invalid runs are refused.

use crate::common::run_config as config;
use crate::common::*;

#[test]
fn losses_fall_repeat_and_agree_between_precisions() {
    let data = text();
    let trained = |settings: &[&str]| {
        let fixed = ["training.steps=60", "optimizer.lr=1e-2"];
        run(&config(data.path(), &[&fixed[..], settings].concat())).unwrap().0
    };
    let [fp8, again] = [trained(&[]), trained(&[])];
    let losses = |outcome: &Outcome| -> Vec<_> {
        outcome.steps.iter().map(|line| (line.step, line.loss, line.grad_norm)).collect()
    };
    assert_eq!(losses(&fp8), losses(&again));
    assert_eq!((fp8.validation_loss, &fp8.sample), (again.validation_loss, &again.sample));
    let expected = fp8.validation_loss.unwrap();
    assert!(fp8.steps[0].loss > 5.0 && expected < 2.0, "{fp8:?}");
    let narrow = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];
    for settings in [
        &["training.precision=f32"][..],
        &["training.precision=f32", narrow[0], narrow[1]],
        &["training.precision=bf16"],
        &narrow[..1],
        &narrow[1..],
        &narrow,
        &[narrow[0], "optimizer.master_weights=true"],
    ] {
        let other = trained(settings);
        let loss = other.validation_loss.unwrap();
        assert!((loss / expected - 1.0).abs() < 0.05 && loss != expected, "{settings:?}: {loss} {expected}");
        // A weight that lost its layer would leave FP8.
        assert!(settings[0].contains("precision") || other.gemms == fp8.gemms, "{settings:?}");
    }
}

#[test]
fn the_log_has_every_part_and_the_gemms_are_counted() {
    let data = text();
    let (outcome, log) = run(&config(data.path(), &[])).unwrap();
    // 16 bytes for each of 69,360 parameters.
    let held = " MiB (parameters 0.26 MiB, gradients 0.26 MiB, AdamW's moments 0.53 MiB)";
    let tokens = open(&config(data.path(), &[])).size().train_tokens;
    let sequences = (tokens - 1).div_ceil(24);
    let epoch = format!("epoch: {sequences} sequences, {:.1} steps  documents: ", sequences as f64 / 4.0);
    let steps: Vec<_> = outcome.steps.iter().map(ToString::to_string).collect();
    let lines: Vec<_> = log.lines().collect();
    for (line, (begins, ends)) in lines.iter().zip([
        ("device: cpu  precision: fp8  compute dtype: f32  attention: tiles", ""),
        ("model: debug  parameters: 69,360", ""),
        ("memory: a step takes about ", held),
        ("data: 10 files (10 text)  tokens: 1", ""),
        (&epoch, ""),
        ("warm-up: 20 of 12 steps, more than a tenth (optimizer.warmup_steps)", ""),
        ("Applied Float8: recipe=tensorwise, 14 of 15 linears; skipped: lm_head", ""),
        (&steps[0], ""),
        (&steps[1], ""),
        (&steps[2], ""),
        (&steps[3], ""),
        ("validation loss: ", ""),
        ("sample:", ""),
    ]) {
        assert!(line.starts_with(begins) && line.ends_with(ends), "{line}, not {begins}");
    }
    assert_eq!(outcome.steps.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 5, 10, 12]);
    // 12 steps of three GEMMs; evaluation and sample do not count.
    let gemms = &outcome.gemms;
    assert_eq!((gemms.native, gemms.emulated, gemms.high_precision), (0, 14 * 12 * 3, 12 * 3));
    assert_eq!(outcome.report.totals(), outcome.gemms);
    assert_eq!(lines.last().unwrap(), &outcome.gemms.to_string());
    // Evaluations during training do not count either. The last call of each GEMM belongs to a
    // step: 4 sequences of 24 tokens.
    let (with, log) = run(&config(data.path(), &["training.eval_every=3"])).unwrap();
    assert_eq!(with.gemms, outcome.gemms);
    assert_eq!(log.matches("  validation loss: ").count(), 3, "{log}");
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
    let source = format!("{{ paths = [{:?}], weight = 1.0 }}", data.path());
    let weights = format!("data.sources=[{source}, {source}]");
    let mut weighted = config(data.path(), &["training.steps=1 epoch", &weights]);
    weighted.data.paths.clear();
    refuses(run(&weighted), "training.steps = 1 epoch: sources with weights have epochs");
}

/// Conversations: the sample is an answer, and only some tokens count in the loss.
#[test]
fn a_run_on_conversations_says_and_samples_what_it_sees() {
    let data = tempfile::tempdir().unwrap();
    let [template, strict, file] = ["chat.jinja", "strict.jinja", "chats.jsonl"].map(|name| data.path().join(name));
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    fs::write(&template, source).unwrap();
    let refusal = "{% if messages[0].content == 'hello' %}{{ raise_exception('no hello') }}{% endif %}";
    fs::write(&strict, format!("{refusal}{source}")).unwrap();
    let chat =
        |answer| json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]});
    let lines = format!("{}\n{}", chat("a long answer that does not fit"), format!("{}\n", chat("ok")).repeat(9));
    fs::write(&file, lines.repeat(6)).unwrap();
    let settings = ["training.steps=2", "data.validation_split=0.2", "generate.prompt=hello"];
    let mut config = config(&file, &settings);
    config.data.chat_template = Some(template.clone());
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains(&format!("sample:\nhello\n{}", outcome.sample)), "{log}");
    assert!(log.contains("  longer than training.seq_len, and cut: "), "{log}");
    let targets: Vec<_> = log.split("  targets: ").nth(1).unwrap().split(' ').collect();
    let [targets, tokens] = [0, 2].map(|word| targets[word].replace(',', "").parse::<u64>().unwrap());
    assert!(0 < targets && targets < tokens, "{log}");
    let prompt = config.text().unwrap().prompt(&config.generate.prompt, true).unwrap();
    assert_eq!(Tokenizer::bytes().decode(&prompt).unwrap(), "<user>hello<assistant>");
    // If the template refuses the prompt, only the sample fails.
    config.data.chat_template = Some(strict);
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains("sample: left out: ") && log.contains("no hello") && outcome.sample.is_empty(), "{log}");
    // Without sampling, the prompt does not matter.
    config.generate.max_new_tokens = 0;
    config.generate.prompt = "hello ".repeat(10_000);
    run(&config).unwrap();
    (config.generate.max_new_tokens, config.generate.prompt) = (8, "hello".into());
    config.data.chat_template = Some(template);
    // Also for a chat model that is trained on text.
    let text = text();
    config.data.paths = vec![text.path().into()];
    let (outcome, log) = run(&config).unwrap();
    assert!(log.contains(&format!("sample:\nhello\n{}", outcome.sample)), "{log}");
}

/// `config` with the model and tokenizer of a Hugging Face folder.
fn of_folder(config: RunConfig, folder: &Path) -> RunConfig {
    let mut config = RunConfig { model: Default::default(), ..config };
    config.model.hf_path = Some(folder.into());
    config
}

/// Errors of a model come before its data is read, which is an empty folder here.
#[test]
fn a_model_is_checked_before_the_data_is_read() {
    let empty = TempDir::new().unwrap();
    let nowhere = empty.path();
    refuses(run(&config(nowhere, &[])), "no text in ");
    refuses(run(&config(nowhere, &["float8.filter_fqns=['no_such_layer']"])), "no_such_layer");
    // Training needs 61 TB.
    let mut huge = RunConfig { model: Default::default(), ..config(nowhere, &["data.tokenizer=bytes"]) };
    huge.model.preset = Some("llama3-405b".into());
    huge.model.overrides.insert("num_hidden_layers".into(), 1200.into());
    let error = run(&huge).unwrap_err().to_string();
    assert!(error.contains("the model takes at least") == cfg!(target_os = "linux"), "{error}");

    let mut tensors = stored_tensors(&tiny(), 1);
    tensors.remove(3);
    let dir = hf_folder(&tiny(), &tensors);
    refuses(run(&of_folder(config(nowhere, &["data.tokenizer=bytes"]), dir.path())), "lacks the tensor ");
    refuses(run(&of_folder(config(nowhere, &[]), Path::new("/nope"))), "there is no folder /nope");
}

#[test]
fn accumulated_micro_batches_are_one_batch() {
    // The whole text is one window, so every batch is the same.
    let data = tempfile::tempdir().unwrap();
    fs::write(data.path().join("a"), "x".repeat(200)).unwrap();
    let first = |settings: &[&str]| {
        let precision = ["training.precision=f32", "training.steps=1", "data.validation_split=0.5"];
        let (outcome, _) = run(&config(data.path(), &[&precision, settings].concat())).unwrap();
        (outcome.steps[0].loss, outcome.steps[0].grad_norm, outcome.validation_loss)
    };
    let whole = first(&["training.batch_size=4"]);
    let parts = first(&["training.batch_size=1", "training.grad_accumulation=4"]);
    for (a, b) in [(whole.0, parts.0), (whole.1, parts.1)] {
        assert!((a - b).abs() < 1e-4 * a, "{whole:?} {parts:?}");
    }
}

#[test]
fn a_checkpoint_is_trained_on() {
    let (data, dir) = (text(), hf_folder(&tiny(), &stored_tensors(&tiny(), 1)));
    let mut config = of_folder(config(data.path(), &["training.steps=0", "generate.max_new_tokens=0"]), dir.path());
    refuses(run(&config), &format!("no tokenizer in {}: set data.tokenizer", dir.path().display()));
    config.data.tokenizer = Some("bytes".into());
    let (loaded, log) = run(&config).unwrap();
    assert!(log.contains("learning rate: 2e-5, the default for fine-tuning"), "{log}");
    assert!(log.contains(&dir.path().display().to_string()) && !log.contains("sample"));
    assert!(loaded.steps.is_empty() && loaded.sample.is_empty());
    config.training.seed = 1;
    assert_eq!(run(&config).unwrap().0.validation_loss, loaded.validation_loss, "the checkpoint decides, not the seed");
    config.training.steps = 2.into();
    let (trained, _) = run(&config).unwrap();
    assert_eq!(trained.steps.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2]);
    assert!(
        trained.validation_loss < loaded.validation_loss,
        "{:?} {:?}",
        trained.validation_loss,
        loaded.validation_loss
    );
}

/// A checkpoint's tokenizer is used in training and in the sample, regardless of a preset's.
#[test]
fn a_checkpoint_brings_its_tokenizer() {
    let dims = tiny_with(|dims| dims.vocab_size = 1008);
    let (data, dir) = (text(), hf_folder(&dims, &stored_tensors(&dims, 1)));
    let vectors = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/tokenizer.json");
    fs::copy(vectors, dir.path().join("tokenizer.json")).unwrap();
    let settings = ["training.steps=1", "data.validation_split=0.5"];
    let mut config = of_folder(config(data.path(), &settings), dir.path());
    let own = config.open_data(&config.text().unwrap(), &ProgressLine::hidden(), &mut std::io::sink()).unwrap();
    assert!(own.size().train_tokens < open(&config).size().train_tokens);
    let (own, log) = run(&config).unwrap();
    assert!(log.contains("tokenizer: tokenizer.json, 1001 tokens"), "{log}");
    config.data.tokenizer = Some("bytes".into());
    let (other, log) = run(&config).unwrap();
    assert!(log.contains("tokenizer: bytes, 257 tokens"), "{log}");
    assert_ne!(own.validation_loss, other.validation_loss);

    // The text has tokens from 288 on.
    config.data.tokenizer = None;
    write_json(&dir.path().join("config.json"), &hf_json(&tiny()));
    refuses(run(&config), "whose vocabulary has 288");
    // A preset accepts a tokenizer by name.
    config.model = Default::default();
    config.model.preset = Some("debug".into());
    config.model.overrides.insert("vocab_size".into(), 1008.into());
    config.data.tokenizer = Some(dir.path().display().to_string());
    run(&config).unwrap();
    config.data.tokenizer = Some(dir.path().join("none.json").display().to_string());
    refuses(run(&config), "none.json");
}
