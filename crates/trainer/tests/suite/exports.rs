//! Export: transformers' logits, the same bytes after import and another export, config.json, and
//! errors.

use crate::common::*;
use crate::float8_exports::{contents, json_file};

fn load(folder: &Path) -> Decoder<Flex> {
    Decoder::load_hf(folder, &Default::default()).unwrap()
}

fn options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

/// Folder with a `config.json` in the newer form with unknown keys, and a tokenizer's files.
fn source(config: &DecoderConfig) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut json = hf_json(config);
    for key in ["rope_theta", "rope_scaling"] {
        json.as_object_mut().unwrap().remove(key);
    }
    json["rope_parameters"] = json!({"rope_type": "default", "rope_theta": config.dims.rope_theta});
    json["architectures"] = json!(["LlamaForSequenceClassification"]);
    json["dtype"] = json!("float16");
    json["initializer_range"] = json!(0.123_456_789_012_345_68);
    json["eos_token_id"] = json!([7, 3]);
    write_json(&dir.path().join("config.json"), &json);
    for name in ["tokenizer.json", "chat_template.jinja", "generation_config.json"] {
        fs::write(dir.path().join(name), format!("the source's {name}")).unwrap();
    }
    fs::write(dir.path().join("README.md"), "not the model's").unwrap();
    dir
}

/// `vectors/*.safetensors`: see `export_vectors.py`.
#[test]
fn transformers_computes_the_same_logits() {
    let made = env::var_os("FLOAT8_EXPORT_VECTORS").map(PathBuf::from);
    let temporary = tempfile::tempdir().unwrap();
    let parent = made.as_deref().unwrap_or(temporary.path());
    for tied in [false, true] {
        let name = if tied { "tied" } else { "untied" };
        // With head_dim = 8 there are wavelengths above, within and below the scaled range.
        let mut config = tiny_with(|dims| {
            (dims.vocab_size, dims.hidden_size, dims.intermediate_size) = (64, 32, 56);
            (dims.num_heads, dims.head_dim, dims.max_seq_len) = (4, 8, 16_384);
            (dims.rope_theta, dims.tie_word_embeddings) = (500_000.0, tied);
        });
        config.rope_scaling = Some(llama3_scaling());
        let dir = tempfile::tempdir().unwrap();
        write_safetensors(&dir.path().join("model.safetensors"), &stored_tensors(&config, 11));
        let model = Decoder::<Flex>::new(config, &Default::default()).unwrap().load_hf_weights(dir.path()).unwrap();
        let mut sums = BTreeMap::new();
        for (dtype, written) in [(ExportDtype::F32, "f32"), (ExportDtype::Bf16, "bf16")] {
            let folder = parent.join(format!("{name}-{written}"));
            model.save_hf(&folder, &options(dtype)).unwrap();
            let sum = digest_of_file(&folder.join("model.safetensors")).unwrap();
            sums.insert(format!("sha256_{written}"), sum);
        }
        if made.is_some() {
            continue;
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/vectors/{name}.safetensors"));
        assert_eq!(sums, metadata(&path), "{name}: other weights than the vectors were made from");
        for model in [model, load(&parent.join(format!("{name}-f32")))] {
            check_logits(&path, &model, 1e-6);
        }
    }
}

#[test]
fn export_import_export_gives_the_same_bytes() {
    for (dtype, tied, max_shard_bytes) in [
        (ExportDtype::F32, false, 30_000),
        (ExportDtype::Bf16, true, 5_000_000_000),
        (ExportDtype::Bf16, false, 30_000),
    ] {
        let config = tiny_with(|dims| {
            // Only exact with serde_json's feature for exact floats.
            (dims.tie_word_embeddings, dims.rms_norm_eps) = (tied, 1.000_001_464_007_551_1e-5);
        });
        let (source, dir) = (source(&config), tempfile::tempdir().unwrap());
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        let options =
            |source: &Path| ExportOptions { dtype, max_shard_bytes, source: Some(source.into()), stop: vec![] };
        model::<Flex>(config, 3).save_hf(&first, &options(source.path())).unwrap();
        load(&first).save_hf(&second, &options(&first)).unwrap();
        let (first, second) = (contents(&first), contents(&second));
        assert!(first == second, "{dtype:?}, tied: {tied}, {max_shard_bytes}");
        assert_eq!(first.contains_key("model.safetensors.index.json"), max_shard_bytes == 30_000);
    }
}

#[test]
fn config_json_keeps_what_the_model_does_not_know() {
    let config =
        DecoderConfig { rope_scaling: Some(llama3_scaling()), ..tiny_with(|dims| dims.rope_theta = 500_000.0) };
    let source = source(&tiny());
    let dir = tempfile::tempdir().unwrap();
    let model = model::<Flex>(config, 1);
    let [with, without] = ["with", "without"].map(|name| dir.path().join(name));
    let from_source = ExportOptions { source: Some(source.path().into()), ..options(ExportDtype::Bf16) };
    model.save_hf(&with, &from_source).unwrap();
    model.save_hf(&without, &options(ExportDtype::F32)).unwrap();
    for folder in [&with, &without] {
        assert_eq!(read_config::<DecoderConfig>(folder).unwrap(), config);
    }

    let mut expected = hf_json(&config);
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192});
    let add =
        |expected: &mut Value, more: Value| expected.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let dtype = |dtype| json!({"dtype": dtype, "torch_dtype": dtype});
    add(&mut expected, json!({"mlp_bias": false, "rope_scaling": scaling}));
    add(&mut expected, dtype("float32"));
    assert_eq!(json_file(&without.join("config.json")), expected);
    add(&mut expected, dtype("bfloat16"));
    add(&mut expected, json!({"initializer_range": 0.123_456_789_012_345_68, "eos_token_id": [7, 3]}));
    assert_eq!(json_file(&with.join("config.json")), expected);

    let names = |folder: &Path| contents(folder).into_keys().collect::<Vec<_>>();
    assert_eq!(names(&without), ["config.json", "model.safetensors"]);
    let assets =
        ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(names(&with), assets);
    assert_eq!(fs::read(with.join("tokenizer.json")).unwrap(), b"the source's tokenizer.json");
}

#[test]
fn assets_outlive_the_folder_that_they_come_from() {
    let (source, kept, dir) = (source(&tiny()), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = model::<Flex>(tiny(), 1);
    let export = |source: &Path, name: &str| {
        let folder = dir.path().join(name);
        model
            .save_hf(&folder, &ExportOptions { source: Some(source.into()), ..Default::default() })
            .map(|()| contents(&folder))
    };
    let direct = export(source.path(), "direct").unwrap();
    fs::write(kept.path().join("tokenizer.json"), "another one, and longer than what it is replaced by").unwrap();
    copy_assets(source.path(), kept.path()).unwrap();
    let before = contents(kept.path());
    assert_eq!(before.len(), 4);
    copy_assets(kept.path(), kept.path().join(".")).unwrap();
    assert_eq!(contents(kept.path()), before);

    let gone = source.path().to_path_buf();
    drop(source);
    assert!(export(kept.path(), "kept").unwrap() == direct);
    // A folder without a config.json can be the source of a tokenizer.
    fs::remove_file(kept.path().join("config.json")).unwrap();
    assert!(export(kept.path(), "tokenizer").unwrap().contains_key("tokenizer.json"));
    for error in [chain(copy_assets(&gone, kept.path()).unwrap_err()), chain(export(&gone, "gone").unwrap_err())] {
        assert!(error.starts_with(&format!("cannot read {}: ", gone.display())), "{error}");
    }
}

/// The files of the base model lack the token with which a chat template ends turns.
#[test]
fn tokens_that_end_generation_are_exported() {
    let (source, dir) = (source(&tiny()), tempfile::tempdir().unwrap());
    let export = |name: &str, source: Option<&Path>| {
        let options = ExportOptions { stop: vec![1, 6], source: source.map(Into::into), ..Default::default() };
        model::<Flex>(tiny(), 1)
            .save_hf(dir.path().join(name), &options)
            .map(|()| json_file(&dir.path().join(name).join("generation_config.json")))
    };
    assert_eq!(export("none", None).unwrap(), json!({"eos_token_id": [1, 6]}));
    let generation = source.path().join("generation_config.json");
    fs::write(&generation, r#"{"top_p": 0.9, "eos_token_id": 1}"#).unwrap();
    assert_eq!(export("own", Some(source.path())).unwrap(), json!({"top_p": 0.9, "eos_token_id": [1, 6]}));
    fs::write(&generation, "{").unwrap();
    let error = chain(export("broken", Some(source.path())).unwrap_err());
    assert!(error.contains("generation_config.json is not valid: "), "{error}");
}

#[test]
fn nothing_is_left_of_an_export_that_fails() {
    let (dir, source) = (tempfile::tempdir().unwrap(), source(&tiny()));
    let (out, file) = (dir.path().join("out"), dir.path().join("file"));
    fs::write(&file, "a file").unwrap();
    let from_source = ExportOptions { source: Some(source.path().into()), ..Default::default() };
    let refused = |config: DecoderConfig, options: &ExportOptions, to: &Path, says: &str| {
        let error = chain(model::<Flex>(config, 1).save_hf(to, options).unwrap_err());
        assert!(error.contains(says), "{error}");
        assert_eq!(contents(dir.path()).into_iter().collect::<Vec<_>>(), [("file".into(), b"a file".to_vec())]);
    };
    refused(tiny_moe(), &from_source, &out, "only dense models are exported: this one has 4 experts");
    refused(tiny(), &from_source, &file, "file exists and is not an empty folder");
    refused(tiny(), &from_source, dir.path(), "exists and is not an empty folder");
    refused(tiny(), &from_source, &file.join("below"), "cannot make the folder");
    fs::remove_file(source.path().join("tokenizer.json")).unwrap();
    fs::create_dir(source.path().join("tokenizer.json")).unwrap();
    refused(tiny(), &from_source, &out, "tokenizer.json: ");
    fs::write(source.path().join("config.json"), "{").unwrap();
    refused(tiny(), &from_source, &out, "config.json is not valid: ");
    write_json(&source.path().join("config.json"), &json!({"model_type": "gpt2"}));
    refused(tiny(), &from_source, &out, "config.json: model_type = \"gpt2\" is not supported");
    // An empty folder is accepted, and parent folders are created.
    fs::create_dir(&out).unwrap();
    for to in [&out, &dir.path().join("new/parent")] {
        model::<Flex>(tiny(), 1).save_hf(to, &ExportOptions::default()).unwrap();
    }
}
