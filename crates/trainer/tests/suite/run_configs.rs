//! TOML, `--set` and flags: precedence, unknown keys, invalid values, and the files in `configs/`.

use crate::common::*;

fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

fn set(settings: &[&str]) -> Result<RunConfig, Error> {
    let settings: Vec<_> = settings.iter().map(|s| s.to_string()).collect();
    RunConfig::load(None, &settings)
}

/// Prompts have the variables of `data`, overridden by the ones of `generate`.
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
    let (_dir, path) = file(&config.to_toml().unwrap());
    assert_eq!(RunConfig::load(Some(&path), &[]).unwrap(), config);
    for other in ["data.paths=['c']", "data.field=body", "data.max_bytes=5", "data.format=text"] {
        let error = set(&[sources, other]).unwrap().validate().unwrap_err();
        assert!(error.to_string().starts_with("data.sources = 2 sources: each source has its own"), "{error}");
    }
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
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        files += 1;
        let config = RunConfig::load(Some(&path), &[]).unwrap();
        config.validate().unwrap();
        let model = config.dimensions().unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(name.replace('_', "-").contains(config.model.preset.as_deref().unwrap()), "{name}");
        assert!(config.training.seq_len <= model.dims.max_seq_len, "{name}");
        assert!(!config.float8(&model).filter_fqns.is_empty() || model.dims.tie_word_embeddings, "{name}");
    }
    assert_eq!(files, 9);
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
