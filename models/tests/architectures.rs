//! Each architecture against transformers, as a Hugging Face folder, and in training. The trainer's
//! tests cover Llama.

use std::fs;
use std::path::{Path, PathBuf};

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Recipe};
use device_select::SelectedDevice;
use models::{CausalLmExt, Decoder, DecoderConfig, Decoders, RunConfig, presets};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use trainer::batches::BatchTensors;
use trainer::checkpoint::{SavedRun, Which};
use trainer::hf::{ExportOptions, Float8Export, read_config};
use trainer::job::{Outcome, Start, train};
use trainer::{LanguageModel, ModelConfig, Sampling, TensorFiles};

type Train = Float8<Autodiff<Flex>>;

/// Folders of [`vectors`].
const MODELS: [&str; 4] = ["qwen3", "qwen3-tied", "qwen2", "mistral"];

/// Folder of a model written by `vectors.py`.
fn vectors(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name)
}

fn load(name: &str) -> Decoder<Flex> {
    Decoder::load_hf(vectors(name), &Default::default()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

struct Reference(Vec<u8>);

impl Reference {
    fn open(name: &str) -> Self {
        Self(fs::read(vectors(name).join("reference.safetensors")).unwrap())
    }

    fn read<T>(&self, tensor: &str, convert: fn([u8; 4]) -> T) -> (Vec<usize>, Vec<T>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(tensor).unwrap();
        let values = tensor.data().chunks_exact(4).map(|bytes| convert(bytes.try_into().unwrap())).collect();
        (tensor.shape().to_vec(), values)
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        self.read(tensor, f32::from_le_bytes).1
    }

    fn ids(&self) -> Tensor<Flex, 2, Int> {
        let (shape, ids) = self.read("input_ids", i32::from_le_bytes);
        Tensor::from_data(TensorData::new(ids, shape), &Default::default())
    }
}

#[test]
fn logits_loss_and_greedy_tokens_are_those_of_transformers() {
    for name in MODELS {
        let (model, reference) = (load(name), Reference::open(name));
        assert_eq!(model.lm_head.is_none(), ["qwen3-tied", "qwen2"].contains(&name), "{name}");
        let logits: Vec<f32> = model.forward(reference.ids()).into_data().to_vec().unwrap();
        let wanted = reference.floats("logits");
        let largest = wanted.iter().fold(0.0_f32, |max, logit| max.max(logit.abs()));
        let error =
            logits.iter().zip(&wanted).fold(0.0_f32, |max, (found, wanted)| max.max((found - wanted).abs())) / largest;
        println!("{name}: logits at most {error:.1e} of the largest from transformers'");
        assert!(logits.len() == wanted.len() && error < 1e-6, "{name}: {error:e}");

        let ids = reference.ids();
        let [batch, len] = ids.dims();
        let part = |from, to| ids.clone().slice([0..batch, from..to]);
        let (inputs, targets) = (part(0, len - 1), part(1, len));
        let loss = model.batch_loss(BatchTensors { inputs, targets, loss_mask: None, documents: None });
        let (loss, wanted) = (loss.into_scalar(), reference.floats("loss")[0]);
        assert!((loss - wanted).abs() < 1e-6 * wanted, "{name}: {loss} {wanted}");

        let (_, greedy) = reference.read("greedy", u32::from_le_bytes);
        let prompt: Vec<i32> = ids.slice([0..1, 0..8]).into_data().to_vec().unwrap();
        let prompt: Vec<u32> = prompt.iter().map(|&token| token as u32).collect();
        assert_eq!(model.generate(&prompt, greedy.len(), 160, &[], Sampling::Greedy).unwrap(), greedy, "{name}");
    }
}

#[test]
fn an_export_is_the_checkpoint_again() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("exported");
        load(name).save_hf(&to, &ExportOptions { source: Some(vectors(name)), ..ExportOptions::default() }).unwrap();
        let [was, now] = [vectors(name), to.clone()].map(|folder| fs::read(folder.join("model.safetensors")).unwrap());
        let [was, now] = [&was, &now].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(was.names().len(), now.names().len(), "{name}");
        for (tensor, view) in was.tensors() {
            let exported = now.tensor(&tensor).unwrap();
            assert!(view.shape() == exported.shape() && view.data() == exported.data(), "{name}: {tensor}");
        }
        let [was, now] = [&vectors(name), &to].map(|folder| read_config::<DecoderConfig>(folder).unwrap());
        assert_eq!(was, now);
        // Keys that say nothing of the dimensions are kept, too.
        let json = |folder: &Path| -> Value {
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
        };
        let (was, now) = (json(&vectors(name)), json(&to));
        for key in ["architectures", "model_type", "layer_types", "sliding_window", "initializer_range"] {
            assert_eq!(was[key], now[key], "{name}: {key}");
        }
    }
}

/// Linears that vLLM fuses share a scale.
#[test]
fn an_export_in_fp8_is_read_back() {
    let (model, dir) = (load("qwen3"), tempfile::tempdir().unwrap());
    let config = Float8Config::new(Recipe::Tensorwise).with_filter_fqns(["lm_head"]);
    let folder = dir.path().join("out");
    model.save_hf_float8(&folder, &ExportOptions::default(), &Float8Export::new(&config)).unwrap();
    let files = TensorFiles::open_folder(&folder).unwrap();
    let scale = |linear: &str| {
        files.get(&format!("model.layers.0.self_attn.{linear}.weight_scale")).unwrap().to_f32().unwrap()[0]
    };
    assert_eq!([scale("q_proj"); 2], [scale("k_proj"), scale("v_proj")]);
    assert_ne!(scale("q_proj"), scale("o_proj"));
    let imported = Decoder::<Flex>::load_hf(&folder, &Default::default()).unwrap();
    let weight = |model: &Decoder<Flex>| -> Vec<f32> {
        model.layers[0].self_attn.k_proj.weight.val().into_data().to_vec().unwrap()
    };
    // Codes of the largest values are 32 apart.
    let pairs = weight(&model).into_iter().zip(weight(&imported));
    assert!(pairs.clone().all(|(was, now)| (was - now).abs() <= scale("k_proj") * 16.0));
    assert!(pairs.clone().any(|(was, now)| was != now), "it was rounded");
}

#[test]
fn what_a_model_does_not_have_is_refused() {
    let read = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut json = serde_json::from_slice(&fs::read(vectors(name).join("config.json")).unwrap()).unwrap();
        change(&mut json);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        read_config::<DecoderConfig>(dir.path()).map_err(|error| error.to_string())
    };
    let set = |name: &str, key: &str, value: Value| read(name, &|json| json[key] = value.clone());
    for (name, key, value, says) in [
        (
            "qwen3",
            "model_type",
            json!("gpt2"),
            "model_type = \"gpt2\" is not supported; llama, qwen3, qwen2, mistral are",
        ),
        ("qwen3", "attention_bias", json!(true), "these linears have no bias"),
        ("qwen3", "use_sliding_window", json!(true), "every layer attends to all positions"),
        ("qwen2", "layer_types", json!(["full_attention", "sliding_attention"]), "only full_attention is"),
        (
            "qwen2",
            "rope_parameters",
            json!({ "rope_type": "yarn", "rope_theta": 1e6 }),
            "rope_parameters.rope_type = \"yarn\"",
        ),
        // In addition to the default in the file's `rope_parameters`.
        ("qwen3", "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 }), "rope_scaling.rope_type = \"yarn\""),
        ("mistral", "sliding_window", json!(4096), "only null is"),
    ] {
        let error = set(name, key, value).unwrap_err();
        assert!(error.contains(says), "{name}, {key}: {error}");
    }
    let missing = read("mistral", &|json| drop(json.as_object_mut().unwrap().remove("sliding_window")));
    assert!(missing.unwrap_err().contains("sliding_window is missing; only null is"), "transformers takes 4096");
    // As in Qwen's own files.
    assert!(set("qwen3", "rope_parameters", Value::Null).is_ok());
    assert!(set("qwen3", "quantization_config", json!({ "quant_method": "fp8" })).is_ok());
    let config = set("qwen3", "num_key_value_heads", Value::Null).unwrap();
    assert_eq!(config.dims.num_kv_heads, config.dims.num_heads, "null is as many as query heads");
}

#[test]
fn published_sizes_have_their_parameters() {
    let count = |name| DecoderConfig::preset(name).unwrap().size().num_params;
    for (preset, parameters) in [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
    ] {
        assert_eq!(count(preset), parameters, "{preset}");
    }
    presets().iter().for_each(|name| DecoderConfig::preset(name).unwrap().validate().unwrap());
    let error = DecoderConfig::preset("qwen3-7b").unwrap_err().to_string();
    assert!(error.contains("`qwen3-7b`") && error.contains("qwen3-8b"), "{error}");
}

#[test]
fn the_type_or_the_preset_decides_the_architecture() {
    let config = |settings: &[&str]| {
        let settings: Vec<_> = settings.iter().map(ToString::to_string).collect();
        RunConfig::load(None, &settings).unwrap().dimensions().map_err(|error| error.to_string())
    };
    assert_eq!(config(&[]).unwrap(), DecoderConfig::preset("llama3-debug").unwrap());
    assert_eq!(config(&["model.type=mistral"]).unwrap(), DecoderConfig::preset("mistral-debug").unwrap());
    let both = config(&["model.type=qwen2", "model.preset=qwen2-7b"]).unwrap();
    assert_eq!(both, DecoderConfig::preset("qwen2-7b").unwrap());
    let error = config(&["model.type=qwen2", "model.preset=qwen3-8b"]).unwrap_err();
    assert!(error.contains("type = qwen2: contradicts preset qwen3-8b, which is a qwen3"), "{error}");
    let error = config(&["model.type=gpt2"]).unwrap_err();
    assert!(error.contains("type = gpt2: must be one of llama3, qwen3, qwen2, mistral"), "{error}");
}

#[test]
fn the_config_file_describes_a_run() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/qwen3_0.6b.toml");
    let config = RunConfig::load(Some(&file), &[]).unwrap();
    config.validate().unwrap();
    assert_eq!(config.dimensions().unwrap(), DecoderConfig::preset("qwen3-0.6b").unwrap());
}

/// Configuration of a small model on a text with a pattern.
fn config(folder: &Path, settings: &[&str]) -> RunConfig {
    let text: String = (0..400).map(|line| format!("fn f{line}() {{ g({}) }}\n", line % 7)).collect();
    fs::write(folder.join("text.txt"), text).unwrap();
    let fixed = [
        "model.type=qwen2",
        "model.overrides.num_hidden_layers=2",
        "model.overrides.hidden_size=64",
        "model.overrides.intermediate_size=96",
        "training.batch_size=2",
        "training.seq_len=48",
        "training.steps=8",
        "training.log_every=1",
        "training.eval_batches=2",
        "training.device=cpu",
        "optimizer.warmup_steps=2",
        "float8.strict=true",
        "generate.max_new_tokens=0",
    ];
    let settings: Vec<_> = fixed.iter().chain(settings).map(|setting| setting.to_string()).collect();
    let mut config = RunConfig::load(None, &settings).unwrap();
    config.data.paths = vec![folder.join("text.txt")];
    config.data.cache = Some(folder.join("cache"));
    config
}

fn run(config: &RunConfig, start: &Start) -> (Outcome, String) {
    let mut log = vec![];
    let outcome = train::<Decoders, Train>(config, start, &SelectedDevice::Cpu, &Default::default(), &mut log);
    (outcome.unwrap_or_else(|error| panic!("{error}")), String::from_utf8(log).unwrap())
}

#[test]
fn every_recipe_trains() {
    let dir = tempfile::tempdir().unwrap();
    for recipe in Recipe::ALL {
        let (outcome, log) = run(&config(dir.path(), &[&format!("float8.recipe={recipe}")]), &Start::default());
        assert!(log.contains(&format!("Applied Float8: recipe={recipe}, 14 of 14 linears")), "{log}");
        let losses: Vec<_> = outcome.steps.iter().map(|line| line.loss).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[7] < losses[0] - 0.5, "{recipe}: {losses:?}");
    }
}

#[test]
fn a_run_is_resumed_with_the_same_losses() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run");
    let mut config = config(
        dir.path(),
        &["float8.recipe=delayed", "model.overrides.tie_word_embeddings=false", "optimizer.decay=constant"],
    );
    let (whole, log) = run(&config, &Start::default());
    assert!(log.contains("skipped: lm_head"), "{log}");
    config.checkpoint.output_dir = Some(folder.clone());
    config.training.steps = "4".parse().unwrap();
    run(&config, &Start::default());
    config.training.steps = "8".parse().unwrap();
    let saved = Some(SavedRun::open(&folder, Which::Latest).unwrap());
    let (rest, log) = run(&config, &Start { saved, is_resumed: true, ..Start::default() });
    assert!(log.contains("resumed: step 4"), "{log}");
    let losses = |outcome: &Outcome| outcome.steps.iter().map(|line| line.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&rest), losses(&whole)[4..]);
}

/// Otherwise a saved tensor would be silently dropped.
#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run");
    let mut config = config(dir.path(), &["model.overrides.tie_word_embeddings=false", "training.steps=1"]);
    config.checkpoint.output_dir = Some(folder.clone());
    run(&config, &Start::default());
    config.model.overrides.insert("tie_word_embeddings".into(), true.into());
    let saved = Some(SavedRun::open(&folder, Which::Latest).unwrap());
    let start = Start { saved, is_resumed: true, ..Start::default() };
    let error = train::<Decoders, Train>(&config, &start, &SelectedDevice::Cpu, &Default::default(), &mut vec![]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("holds tensors that the model does not have: lm_head.weight"), "{error}");
}
