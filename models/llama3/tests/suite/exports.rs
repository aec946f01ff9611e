//! Export: transformers' logits, the same bytes after import and another export, shards,
//! config.json, and errors.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use train::CausalLmExt;
use train::hf::read_config;

use burn::backend::Flex;
use burn::tensor::bf16;
use burn_float8::Float8Config;
use llama3::{Error, Llama, Llama3, LlamaConfig};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;
use train::hf::{ExportDtype, ExportOptions, copy_assets};
use train::job::Weights;
use train::job::prepare;
use train::{ProgressLine, TensorFiles, TensorFilesError, digest_of_file};

use crate::common::{
    Stored, Train, hf_json, ids, llama3_scaling, model, run_alone, run_config, stored_tensors, tiny, tiny_moe,
    tiny_with, tokens, values, write_json, write_safetensors,
};

fn load(folder: &Path) -> Llama<Flex> {
    Llama::load_hf(folder, &Default::default()).unwrap()
}

/// Model loaded from a folder with these tensors.
fn loaded(config: &LlamaConfig, tensors: &[Stored]) -> Llama<Flex> {
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(config));
    write_safetensors(&dir.path().join("model.safetensors"), tensors);
    Llama::new(config.clone(), &Default::default()).unwrap().load_hf_weights(dir.path()).unwrap()
}

fn options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

/// Names and contents of all files in a folder.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    fs::read_dir(folder).unwrap().map(|entry| file(entry.unwrap())).collect()
}

fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Folder with a `config.json` in the newer form with unknown keys, and a tokenizer's files.
fn source(config: &LlamaConfig) -> TempDir {
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
        let model = loaded(&config, &stored_tensors(&config, 11));
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
        let file = fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&file).unwrap();
        let expected: BTreeMap<_, _> = header.metadata().clone().unwrap().into_iter().collect();
        assert_eq!(sums, expected, "{name}: other weights than the vectors were made from");

        let vectors = TensorFiles::open_file(&path).unwrap();
        let input_ids = vectors.get("input_ids").unwrap();
        let shape = input_ids.shape().try_into().unwrap();
        let input_ids: Vec<_> =
            input_ids.bytes().unwrap().as_chunks().0.iter().map(|&id| i32::from_le_bytes(id)).collect();
        let expected = vectors.get("logits").unwrap().to_f32().unwrap();
        for model in [model, load(&parent.join(format!("{name}-f32")))] {
            let logits = values(model.forward(ids(&input_ids, shape)));
            assert_eq!(logits.len(), expected.len());
            let error = logits.iter().zip(&expected).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
            let scale = expected.iter().fold(0.0_f32, |max, b| max.max(b.abs()));
            println!("{name}: at most {error:.1e} from transformers' logits, the largest of which is {scale:.1}");
            assert!(error <= 1e-6 * scale, "{name}: {error:e} of {scale}");
        }
    }
}

#[test]
fn export_import_export_gives_the_same_bytes() {
    // An epsilon that serde_json only parses exactly with its feature for exact floats.
    let rms_norm_eps = 1.000_001_464_007_551_1e-5;
    for dtype in [ExportDtype::F32, ExportDtype::Bf16] {
        for tied in [false, true] {
            for max_shard_bytes in [5_000_000_000, 30_000] {
                let config = tiny_with(|dims| {
                    dims.tie_word_embeddings = tied;
                    dims.rms_norm_eps = rms_norm_eps
                });
                let source = source(&config);
                let dir = tempfile::tempdir().unwrap();
                let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
                let options =
                    |source: &Path| ExportOptions { dtype, max_shard_bytes, source: Some(source.into()), stop: vec![] };
                model::<Flex>(config, 3).save_hf(&first, &options(source.path())).unwrap();
                load(&first).save_hf(&second, &options(&first)).unwrap();
                let (first, second) = (contents(&first), contents(&second));
                assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
                assert!(first == second, "{dtype:?}, tied: {tied}, {max_shard_bytes}");
                assert_eq!(first.contains_key("model.safetensors.index.json"), max_shard_bytes == 30_000);
            }
        }
    }
}

#[test]
fn a_model_that_trains_in_fp8_exports_its_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let config = run_config(dir.path(), &["training.precision=fp8", "training.seed=9"]);
    let weights = Weights::open(&config, None, config.dimensions().unwrap()).unwrap();
    let (progress, out) = (ProgressLine::hidden(), &mut std::io::sink());
    let fp8 = prepare::<Llama3, Train>(&config, weights, &Default::default(), &progress, out).unwrap();
    let plain = model::<Flex>(fp8.config().clone(), 9);
    let [ours, expected] = ["ours", "expected"].map(|name| dir.path().join(name));
    fp8.save_hf(&ours, &ExportOptions::default()).unwrap();
    plain.save_hf(&expected, &ExportOptions::default()).unwrap();
    assert!(contents(&ours) == contents(&expected));
}

/// Parameters have the same layout as ones that were never in a file.
#[test]
fn an_imported_model_computes_the_exported_ones_bits() {
    let dir = tempfile::tempdir().unwrap();
    let original = model::<Train>(tiny(), 5);
    original.save_hf(dir.path().join("out"), &ExportOptions::default()).unwrap();
    let imported = Llama::<Train>::load_hf(dir.path().join("out"), &Default::default()).unwrap();
    assert_eq!(crate::common::parameters(&imported), crate::common::parameters(&original));
    let ids = || ids(&tokens([2, 16], 288, 6), [2, 16]);
    // Applies an explicit configuration: the device's default is shared with other tests.
    let logits =
        |model: Llama<Train>| values(Float8Config::tensorwise().apply::<Train, _>(model).unwrap().0.forward(ids()));
    assert_eq!(logits(imported), logits(original));
}

#[test]
fn bf16_is_rounded_to_nearest_ties_to_even() {
    let config = tiny();
    let mut tensors = stored_tensors(&config, 7);
    let norm = tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
    let cases = [
        (0x3f80_8000, 0x3f80),
        (0x3f80_8001, 0x3f81),
        (0x3f81_8000, 0x3f82),
        (0x3f81_7fff, 0x3f81),
        (0xbf80_8000, 0xbf80),
        (0x0000_8001, 0x0001),
        (0x8000_0000, 0x8000),
        (0x7f7f_ffff, 0x7f80),
        (0xff80_0000, 0xff80),
    ];
    for (slot, (bits, _)) in norm.bytes.as_chunks_mut::<4>().0.iter_mut().zip(cases) {
        *slot = f32::to_le_bytes(f32::from_bits(bits));
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    loaded(&config, &tensors).save_hf(&folder, &options(ExportDtype::Bf16)).unwrap();
    let files = TensorFiles::open_folder(&folder).unwrap();
    let bits = |name: &str| -> Vec<u16> {
        let tensor = files.get(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::BF16);
        tensor.bytes().unwrap().as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
    };
    assert_eq!(bits("model.norm.weight")[..cases.len()], cases.map(|(_, rounded)| rounded));
    for Stored { name, bytes, .. } in &tensors {
        let rounded = |&bytes: &[u8; 4]| bf16::from_f32(f32::from_le_bytes(bytes)).to_bits();
        assert_eq!(bits(name), bytes.as_chunks().0.iter().map(rounded).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn shards_are_named_filled_and_indexed_as_transformers_does() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    // The embedding and the output layer are larger than a shard.
    let max_shard_bytes = 40_000;
    model::<Flex>(config.clone(), 1)
        .save_hf(&folder, &ExportOptions { max_shard_bytes, ..Default::default() })
        .unwrap();
    let index = json_file(&folder.join("model.safetensors.index.json"));
    let expected = stored_tensors(&config, 1);
    let total: usize = expected.iter().map(|t| t.bytes.len()).sum();
    assert_eq!(index["metadata"], json!({"total_size": total}));

    let weight_map = index["weight_map"].as_object().unwrap();
    assert_eq!(weight_map.len(), expected.len());
    let mut sizes = BTreeMap::<&str, Vec<usize>>::new();
    for tensor in &expected {
        sizes.entry(weight_map[&tensor.name].as_str().unwrap()).or_default().push(tensor.bytes.len());
    }
    let names: Vec<_> = (1..=sizes.len()).map(|i| format!("model-{i:05}-of-{:05}.safetensors", sizes.len())).collect();
    assert!(sizes.len() > 3 && sizes.keys().eq(&names), "{sizes:?}");
    let full = |sizes: &&Vec<usize>| sizes.len() > 1 && sizes.iter().sum::<usize>() <= max_shard_bytes as usize;
    assert_eq!(
        sizes.values().filter(|sizes| sizes.len() == 1).count() + sizes.values().filter(full).count(),
        sizes.len()
    );
    // The first tensor of a shard would not fit in the previous one.
    let filled: Vec<_> = sizes.values().collect();
    for pair in filled.windows(2) {
        assert!(pair[0].iter().sum::<usize>() + pair[1][0] > max_shard_bytes as usize, "{filled:?}");
    }
    // Required by older versions of transformers.
    let bytes = fs::read(folder.join(&names[0])).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
fn config_json_keeps_what_the_model_does_not_know() {
    let config = LlamaConfig { rope_scaling: Some(llama3_scaling()), ..tiny_with(|dims| dims.rope_theta = 500_000.0) };
    let source = source(&tiny());
    let dir = tempfile::tempdir().unwrap();
    let model = model::<Flex>(config.clone(), 1);
    let [with, without] = ["with", "without"].map(|name| dir.path().join(name));
    let from_source = ExportOptions { source: Some(source.path().into()), ..options(ExportDtype::Bf16) };
    model.save_hf(&with, &from_source).unwrap();
    model.save_hf(&without, &options(ExportDtype::F32)).unwrap();
    for folder in [&with, &without] {
        assert_eq!(read_config::<LlamaConfig>(folder).unwrap(), config);
    }

    let mut expected = hf_json(&config);
    expected["mlp_bias"] = json!(false);
    expected["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    for key in ["dtype", "torch_dtype"] {
        expected[key] = json!("float32");
    }
    assert_eq!(json_file(&without.join("config.json")), expected);
    for key in ["dtype", "torch_dtype"] {
        expected[key] = json!("bfloat16");
    }
    expected["initializer_range"] = json!(0.123_456_789_012_345_68);
    expected["eos_token_id"] = json!([7, 3]);
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
    assert!(matches!(copy_assets(&gone, kept.path()), Err(Error::Io { path, .. }) if path == gone));
    assert!(matches!(export(&gone, "gone"), Err(Error::Io { path, .. }) if path == gone));
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
    assert!(matches!(export("broken", Some(source.path())), Err(Error::Json { .. })));
}

#[test]
fn nothing_is_left_of_an_export_that_fails() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let plain = ExportOptions::default();
    let dense = model::<Flex>(tiny(), 1);
    let moe = model::<Flex>(tiny_moe(), 1).save_hf(&out, &plain).unwrap_err();
    assert!(matches!(moe, Error::MoeExport { num_experts: 4 }), "{moe}");

    let source = source(&tiny());
    let from_source = ExportOptions { source: Some(source.path().into()), ..plain.clone() };
    let refused = || dense.save_hf(&out, &from_source).unwrap_err();
    fs::remove_file(source.path().join("tokenizer.json")).unwrap();
    fs::create_dir(source.path().join("tokenizer.json")).unwrap();
    assert!(matches!(refused(), Error::Io { path, .. } if path.ends_with("tokenizer.json")));
    fs::write(source.path().join("config.json"), "{").unwrap();
    assert!(matches!(refused(), Error::Json { .. }));
    write_json(&source.path().join("config.json"), &json!({"model_type": "qwen2"}));
    assert!(matches!(refused(), Error::HfUnsupported { key, .. } if key == "model_type"));
    assert_eq!(contents(dir.path()), BTreeMap::new());

    fs::write(&out, "a file").unwrap();
    let occupied = |path: &Path| {
        let error = dense.save_hf(path, &plain).unwrap_err();
        assert!(error.to_string().contains(" exists and is not an empty folder"), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    };
    occupied(&out);
    let below = dense.save_hf(out.join("below"), &plain).unwrap_err();
    assert!(below.to_string().starts_with("cannot make the folder "), "{below}");
    assert_eq!(contents(dir.path()).into_iter().collect::<Vec<_>>(), [("out".into(), b"a file".to_vec())]);
    occupied(dir.path());

    // An empty folder is accepted, and parent folders are created.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    dense.save_hf(&empty, &plain).unwrap();
    occupied(&empty);
    dense.save_hf(dir.path().join("new/parent"), &plain).unwrap();
    assert!(contents(&empty) == contents(&dir.path().join("new/parent")));
}

#[cfg(unix)]
#[test]
fn nothing_is_left_when_a_file_cannot_grow() {
    let variable = "FLOAT8_TEST_FULL";
    let Some(folder) = env::var_os(variable) else {
        let dir = tempfile::tempdir().unwrap();
        // A file size limit simulates a full disk. Its signal would end the process.
        let shell = "trap '' XFSZ; ulimit -f 100";
        run_alone("exports::nothing_is_left_when_a_file_cannot_grow", variable, dir.path(), Some(shell));
        return assert_eq!(contents(dir.path()), BTreeMap::new());
    };
    let out = Path::new(&folder).join("out");
    let error = model::<Flex>(tiny(), 1).save_hf(out, &ExportOptions::default()).unwrap_err();
    let Error::TensorFiles(TensorFilesError::Write { path, source }) = error else { panic!("{error}") };
    assert!(path.ends_with("model.safetensors"));
    assert_eq!(source.kind(), std::io::ErrorKind::FileTooLarge);
}
