//! TOML, `--set` and flags: precedence, unknown keys, invalid values, and the files in `configs/`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Error;
use clap::Parser;
use device_select::DeviceChoice;
use models::{DecoderConfig, RunConfig};
use tempfile::TempDir;
use trainer::Message;
use trainer::cli::Args;
use trainer::config::{ConfigError, Precision, StorageDtype};
use trainer::schedule::Decay;

use crate::common::{hf_json, llama3_scaling, refuses, tiny, tiny_moe, tiny_with, write_json};

fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

fn args(arguments: &[&str]) -> Result<RunConfig, Error> {
    Args::try_parse_from([&["llama3_fp8"], arguments].concat()).unwrap().run_config()
}

fn set(settings: &[&str]) -> Result<RunConfig, Error> {
    let settings: Vec<_> = settings.iter().map(|s| s.to_string()).collect();
    RunConfig::load(None, &settings)
}

#[test]
fn later_sources_win() {
    let (_dir, path) = file("[training]\nsteps = 10\nseed = 10\nbatch_size = 10\nprecision = 'bf16'\n");
    let path = path.to_str().unwrap();
    let defaults = args(&[]).unwrap();
    assert_eq!(defaults, RunConfig::default());
    let config = args(&["--config", path]).unwrap().training;
    assert_eq!((config.steps.get(), config.seed, config.batch_size), (10, 10, 10));
    assert_eq!(config.seq_len, defaults.training.seq_len);
    let config = args(&["--steps", "30", "--config", path, "--set", "training.steps=20", "--set", "training.seed=20"]);
    let config = config.unwrap().training;
    assert_eq!((config.steps.get(), config.seed, config.batch_size), (30, 20, 10));
    let config = args(&["--config", path, "--set", "training.seed=1", "--set", "training.seed=2"]).unwrap();
    assert_eq!((config.training.seed, config.training.precision), (2, Precision::Bf16));
    let flags = ["--device", "cpu", "--precision", "f32", "--data", "x", "--data", "y", "--seed", "3"];
    let config = args(&[&["--config", path], &flags[..]].concat()).unwrap();
    assert_eq!(config.training.device, DeviceChoice::Cpu);
    assert_eq!((config.training.precision, config.training.seed), (Precision::F32, 3));
    assert_eq!(config.data.paths, [Path::new("x"), Path::new("y")]);
}

#[test]
fn settings_are_toml_or_plain_words() {
    let config = set(&[
        "training.precision=bf16",
        "training.compute_dtype=\"bf16\"",
        "optimizer.lr=1e-4",
        "optimizer.betas=[0.8, 0.9]",
        "optimizer.decay=linear",
        "training.grad_clip_norm=inf",
        "data.paths=[\"a\", \"b\"]",
        "model.preset=llama3-8b",
        "model.overrides={ rope_theta = 2e6 }",
        "model.overrides.vocab_size=300",
        "float8.filter_fqns=[]",
        "generate.prompt=let x = 1;",
    ])
    .unwrap();
    assert_eq!(config.training.compute_dtype, Some(StorageDtype::Bf16));
    assert_eq!((config.optimizer.lr, config.optimizer.betas), (Some(1e-4), [0.8, 0.9]));
    assert_eq!((config.optimizer.decay, config.training.grad_clip_norm), (Decay::Linear, f64::INFINITY));
    assert_eq!(config.data.paths.len(), 2);
    let dims = config.dimensions().unwrap().dims;
    assert_eq!((dims.rope_theta, dims.vocab_size, dims.num_layers), (2e6, 300, 32));
    assert_eq!(config.float8.filter_fqns, Some(vec![]));
    assert_eq!(config.generate.prompt, "let x = 1;");
}

#[test]
fn unknown_keys_and_wrong_types_are_named() {
    for (setting, named) in [
        ("training.step=1", "step"),
        ("trainin.steps=1", "trainin"),
        ("float8.recip=rowwise", "; did you mean `recipe`?"),
        ("model.overrides.rope_theta=nan", "`rope_theta` has inf or nan"),
        ("training.steps=many", "many"),
        ("training.steps=-1", "-1"),
        ("training.precision=fp4", "fp4"),
        ("training.device=tpu", "tpu"),
        ("float8.recipe=nibblewise", "nibblewise"),
        ("training.steps.more=1", "training.steps.more"),
        ("steps=1", "section.key=value"),
        ("training.steps", "section.key=value"),
        ("training.=1", "section.key=value"),
        // In plain words, without Rust type names.
        ("training.batch_size=many", "expected an integer of 0 or more"),
        ("optimizer.lr=high", "expected a number"),
        ("float8.filter_fqns=[lm_head]", "[lm_head] is not TOML, in which texts are in quotes, as in [\"lm_head\"]"),
        ("training.steps=3 passes", "of epochs, as \"3 epochs\""),
    ] {
        let error = set(&["training.steps=5", setting]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("--set {setting}: ")) && error.contains(named), "{error}");
    }
    for (text, named) in
        [("[training]\nstep = 1", "step"), ("[training]\nsteps = 'x'", "steps = 'x'"), ("steps =", "steps")]
    {
        let (_dir, path) = file(text);
        let error = RunConfig::load(Some(&path), &[]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", path.display())) && error.contains(named), "{error}");
    }
    refuses(RunConfig::load(Some(Path::new("absent.toml")), &[]), "cannot read absent.toml");
}

#[test]
fn impossible_values_are_named() {
    for (setting, key) in [
        ("training.batch_size=0", "training.batch_size"),
        ("training.grad_accumulation=0", "training.grad_accumulation"),
        ("training.seq_len=0", "training.seq_len"),
        ("training.log_every=0", "training.log_every"),
        ("training.eval_batches=0", "training.eval_batches"),
        ("training.grad_clip_norm=0", "training.grad_clip_norm"),
        ("training.grad_clip_norm=nan", "training.grad_clip_norm"),
        ("data.max_bytes=0", "data.max_bytes"),
        ("data.validation_split=-0.1", "data.validation_split"),
        ("data.validation_split=1", "data.validation_split"),
        ("optimizer.lr=0", "optimizer.lr"),
        ("optimizer.lr=inf", "optimizer.lr"),
        ("optimizer.betas=[1.0, 0.9]", "optimizer.betas[0]"),
        ("optimizer.betas=[0.9, -0.1]", "optimizer.betas[1]"),
        ("optimizer.eps=0", "optimizer.eps"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay"),
        ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio"),
        ("generate.temperature=-1", "generate.temperature"),
        ("float8.schedule={ warmup = 600 }", "float8.schedule"),
        ("float8.schedule={ warmup = 0.5, cooldown = 0.5 }", "float8.schedule"),
        ("generate.prompt=\"\"", "generate.prompt = \"\": must not be empty"),
    ] {
        let error = args(&["--set", setting]).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ConfigError::Value { .. })), "{error:?}");
        assert!(error.to_string().starts_with(key), "{error}");
    }
}

#[test]
fn variables_of_the_template_are_tables() {
    let (_dir, template) = file("{{ x }}{{ y }}{{ messages[0].content }}");
    let template = format!("data.chat_template={}", template.display());
    let config = set(&[&template, "data.chat_template_kwargs={x = 1, y = false}", "data.chat_template_kwargs.y='z'"]);
    let config = RunConfig::from_toml(Path::new("a"), &config.unwrap().to_toml().unwrap()).unwrap();
    let text = config.text().unwrap();
    assert_eq!(text.template.unwrap().render(&[Message::new("user", "a")], false).unwrap(), "1za");
    let error = set(&[&template, "data.chat_template_kwargs.tools=1"]).unwrap().text().unwrap_err().to_string();
    assert_eq!(error, "`tools` in `chat_template_kwargs` is not for others to set: remove it");
}

#[test]
fn a_model_is_a_preset_with_changes_or_a_checkpoint() {
    assert_eq!(RunConfig::default().dimensions().unwrap(), DecoderConfig::preset("debug").unwrap());
    let changed = set(&[
        "model.preset=llama3-1b",
        "model.overrides.num_hidden_layers=2",
        "model.overrides.max_position_embeddings=64",
    ])
    .unwrap()
    .dimensions()
    .unwrap();
    let mut expected = DecoderConfig::preset("llama3-1b").unwrap();
    (expected.dims.num_layers, expected.dims.max_seq_len) = (2, 64);
    assert_eq!(changed, expected);
    let scaled = set(&[
        "model.overrides.rope_scaling={rope_type = 'llama3', factor = 8, low_freq_factor = 1, high_freq_factor = 4, \
         original_max_position_embeddings = 8192}",
    ]);
    assert_eq!(scaled.unwrap().dimensions().unwrap().rope_scaling, Some(llama3_scaling()));
    let mixture = set(&["model.overrides={ num_experts = 4, num_experts_per_tok = 2 }"]).unwrap().dimensions().unwrap();
    let mut expected = DecoderConfig::preset("debug").unwrap();
    expected.dims.moe = tiny_moe().dims.moe;
    assert_eq!(mixture, expected);
    for (setting, text) in [
        ("model.overrides.num_experts=4", "num_experts_per_tok"),
        ("model.overrides.num_attention_heads=5", "model config: num_kv_heads = 2: must divide num_heads = 5"),
        ("model.overrides.vocab_size=many", "vocab_size"),
        ("model.overrides.num_layers=2", "did you mean `num_hidden_layers`?"),
        ("model.overrides.model_type=qwen3", "model.overrides: unknown key `model_type`"),
        ("model.preset=9b", "unknown model preset `9b`; there"),
    ] {
        let error = set(&[setting]).unwrap().dimensions().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }

    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(&tiny()));
    let path = format!("model.hf_path={:?}", dir.path());
    assert_eq!(set(&[&path]).unwrap().dimensions().unwrap(), tiny());
    for other in ["model.preset=debug", "model.type=llama3"] {
        refuses(set(&[&path, other]).unwrap().dimensions(), "model.hf_path = ");
    }
    let stretched = set(&[&path, "model.overrides.rope_theta=2e6"]).unwrap().dimensions().unwrap();
    assert_eq!(stretched, tiny_with(|dims| dims.rope_theta = 2e6));
    // A flag cannot remove the file's preset, so it replaces it. The file's type and a flag's
    // preset remain.
    let load = |text: &str, settings: &[&str]| {
        let (_dir, path) = file(text);
        let settings: Vec<_> = settings.iter().map(|s| s.to_string()).collect();
        RunConfig::load(Some(&path), &settings).unwrap().dimensions()
    };
    assert_eq!(load("[model]\npreset = 'debug'", &[&path]).unwrap(), tiny());
    for (text, settings) in [
        ("[model]\ntype = 'llama3'", vec![path.as_str()]),
        ("[model]\npreset = 'debug'", vec!["model.preset=llama3-1b", &path]),
    ] {
        refuses(load(text, &settings), "model.hf_path = ");
    }
}

#[test]
fn sources_stand_alone_and_are_read_back() {
    let sources =
        "data.sources=[{ paths = ['a'], weight = 3.0 }, { paths = ['b.jsonl'], field = 'body', weight = 1.0 }]";
    let config = set(&[sources, "data.packing=whole", "checkpoint.output_dir=runs/a"]).unwrap();
    config.validate().unwrap();
    assert_eq!(config.data.sources().len(), 2);
    assert_eq!(config.data.sources()[1].field, "body");
    let (_dir, path) = file(&config.to_toml().unwrap());
    assert_eq!(RunConfig::load(Some(&path), &[]).unwrap(), config);
    for other in ["data.paths=['c']", "data.field=body", "data.max_bytes=5", "data.format=text"] {
        let error = set(&[sources, other]).unwrap().validate().unwrap_err();
        assert!(error.to_string().starts_with("data.sources = 2 sources: each source has its own"), "{error}");
    }
    // A flag replaces the sources of the file.
    let replaced = args(&["--set", sources, "--data", "c"]).unwrap().data.sources();
    assert_eq!(replaced.iter().map(|source| &source.paths).collect::<Vec<_>>(), [&[PathBuf::from("c")]]);
}

#[test]
fn the_output_layer_is_filtered_where_it_is_a_linear() {
    let filter = |settings: &[&str], tied| {
        let model = tiny_with(|dims| dims.tie_word_embeddings = tied);
        set(settings).unwrap().float8(&model).filter_fqns
    };
    assert_eq!(filter(&[], false), ["lm_head"]);
    assert_eq!(set(&[]).unwrap().float8(&tiny_moe()).filter_fqns, ["lm_head", "moe.router"]);
    assert!(filter(&[], true).is_empty());
    assert_eq!(filter(&["float8.filter_fqns=['k_proj']"], false), ["k_proj"]);
    assert!(filter(&["float8.filter_fqns=[]"], false).is_empty());
}

#[test]
fn every_config_file_describes_a_run() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut files = 0;
    for entry in fs::read_dir(configs).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("llama3_") || !name.ends_with(".toml") {
            continue;
        }
        files += 1;
        let config = RunConfig::load(Some(&path), &[]).unwrap();
        config.validate().unwrap();
        let model = config.dimensions().unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert_eq!(
            name.trim_start_matches("llama3_").trim_end_matches("_8gpus").replace('_', "-"),
            config.model.preset.as_deref().unwrap().trim_start_matches("llama3-")
        );
        assert!(config.training.seq_len <= model.dims.max_seq_len, "{name}");
        assert!(!config.float8(&model).filter_fqns.is_empty() || model.dims.tie_word_embeddings, "{name}");
    }
    assert!(files >= 3, "{files} files");
    let debug = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/llama3_debug.toml");
    let mut written_out = RunConfig::load(Some(&debug), &[]).unwrap();
    assert_eq!(written_out.optimizer.lr.take(), Some(5e-3));
    let mut defaults = RunConfig::default();
    defaults.model.preset = Some("debug".into());
    assert_eq!(written_out, defaults, "llama3_debug.toml spells out the defaults");

    // The file also works for a tied checkpoint.
    let dir = tempfile::tempdir().unwrap();
    let tied = tiny_with(|dims| dims.tie_word_embeddings = true);
    write_json(&dir.path().join("config.json"), &hf_json(&tied));
    let config = RunConfig::load(Some(&debug), &[format!("model.hf_path={:?}", dir.path())]).unwrap();
    assert_eq!(config.dimensions().unwrap(), tied);
    assert!(config.float8(&tied).filter_fqns.is_empty());
}
