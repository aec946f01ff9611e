//! Loading: one file, shards, tied outputs, dtypes, and invalid checkpoints.

use std::fs;
use std::path::Path;
use train::CausalLmExt;

use burn::backend::Flex;
use burn::tensor::{bf16, f16};
use burn_float8::seam::visit_params;
use llama3::{Error, Llama, Llama3, LlamaConfig, RunConfig};
use safetensors::Dtype;
use serde_json::json;
use tempfile::TempDir;
use train::ProgressLine;
use train::hf::names;
use train::job::Weights;
use train::job::prepare;

use crate::common::{
    Stored, Train, hf_json, named_values, stored_tensors, tiny, tiny_with, values, write_json, write_safetensors,
};

fn folder(config: &LlamaConfig, tensors: &[Stored]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(config));
    write_safetensors(&dir.path().join("model.safetensors"), tensors);
    dir
}

fn load(dir: &Path) -> Result<Llama<Flex>, Error> {
    Llama::load_hf(dir, &Default::default())
}

fn assert_refused(dir: &Path, expected: &str) {
    let error = load(dir).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

/// Every parameter by Hugging Face name, in Burn's layout.
fn parameters(model: &Llama<Flex>) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    // Contiguous, although a linear's weight was transposed.
    visit_params::<Flex, _>(model, |param| assert!(param.float().unwrap().is_contiguous(), "{}", param.name()));
    let named = named_values::<Flex, _>(model).into_iter();
    named.map(|(name, shape, values)| (names::hf_name(&name), shape, values)).collect()
}

fn floats(stored: &Stored) -> Vec<f32> {
    stored.bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn every_tensor_lands_where_its_name_says() {
    let config = tiny();
    let tensors = stored_tensors(&config, 1);
    let loaded = parameters(&load(folder(&config, &tensors).path()).unwrap());
    assert_eq!(loaded.len(), tensors.len());
    for (name, shape, values) in loaded {
        let stored = tensors.iter().find(|t| t.name == name).expect(&name);
        let expected = floats(stored);
        if name.contains("proj") || name.starts_with("lm_head") {
            let [rows, cols] = stored.shape[..] else { panic!("{name}") };
            assert_eq!(shape, [cols, rows], "{name}");
            let is_transposed = |at: usize| values[at % cols * rows + at / cols] == expected[at];
            assert!((0..rows * cols).all(is_transposed), "{name}");
        } else {
            assert_eq!((shape, values), (stored.shape.clone(), expected), "{name}");
        }
    }
}

#[test]
fn shards_equal_one_file() {
    let config = tiny();
    let tensors = stored_tensors(&config, 2);
    let single = parameters(&load(folder(&config, &tensors).path()).unwrap());

    let dir = tempfile::tempdir().unwrap();
    write_json(&dir.path().join("config.json"), &hf_json(&config));
    let mut weight_map = serde_json::Map::new();
    for (i, shard) in tensors.chunks(8).enumerate() {
        let file = format!("model-{:05}-of-00003.safetensors", i + 1);
        write_safetensors(&dir.path().join(&file), shard);
        weight_map.extend(shard.iter().map(|t| (t.name.clone(), json!(file))));
    }
    let index = dir.path().join("model.safetensors.index.json");
    write_json(&index, &json!({"metadata": {"total_size": 1}, "weight_map": weight_map}));
    assert_eq!(parameters(&load(dir.path()).unwrap()), single);

    for (name, file, expected) in [
        ("model.extra", Some("model-00001-of-00003.safetensors"), "model.extra is not in "),
        ("model.norm.weight", None, "model.norm.weight of "),
        ("model.norm.weight", Some("absent.safetensors"), "absent.safetensors is not there, in which "),
    ] {
        let mut wrong = weight_map.clone();
        match file {
            Some(file) => wrong.insert(name.into(), json!(file)),
            None => wrong.remove(name),
        };
        write_json(&index, &json!({"weight_map": wrong}));
        assert_refused(dir.path(), expected);
    }
    fs::write(&index, "{}").unwrap();
    assert_refused(dir.path(), "index.json is not valid");
}

#[test]
fn half_precision_tensors_widen_exactly() {
    let config = tiny();
    let mut tensors = stored_tensors(&config, 3);
    let mut expected = tensors.clone();
    for (i, (stored, expected)) in tensors.iter_mut().zip(&mut expected).enumerate() {
        let narrow = |x: f32| match i % 2 {
            0 => (bf16::from_f32(x).to_le_bytes(), bf16::from_f32(x).to_f32()),
            _ => (f16::from_f32(x).to_le_bytes(), f16::from_f32(x).to_f32()),
        };
        let (bytes, wide): (Vec<_>, Vec<_>) = floats(stored).into_iter().map(narrow).unzip();
        stored.dtype = if i % 2 == 0 { Dtype::BF16 } else { Dtype::F16 };
        stored.bytes = bytes.concat();
        *expected = Stored::f32(&stored.name, &stored.shape, &wide);
    }
    let narrow = parameters(&load(folder(&config, &tensors).path()).unwrap());
    assert_eq!(narrow, parameters(&load(folder(&config, &expected).path()).unwrap()));
}

#[test]
fn a_tied_checkpoint_needs_no_output_layer_and_may_repeat_it() {
    let config = tiny_with(|dims| dims.tie_word_embeddings = true);
    let tensors = stored_tensors(&config, 4);
    let without = load(folder(&config, &tensors).path()).unwrap();
    assert!(without.lm_head.is_none());
    let mut repeated = tensors.clone();
    repeated.push(Stored { name: "lm_head.weight".into(), ..tensors[0].clone() });
    assert_eq!(parameters(&load(folder(&config, &repeated).path()).unwrap()), parameters(&without));
}

/// As in merged adapters: config.json says tied, but the file has an output layer that differs from
/// the embedding.
#[test]
fn a_tied_checkpoint_with_another_output_layer_is_refused_until_one_is_chosen() {
    let tied = tiny_with(|dims| dims.tie_word_embeddings = true);
    let dir = folder(&tied, &stored_tensors(&tiny(), 4));
    let differs = "config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: \
                   set model.tie_word_embeddings to false";
    assert_refused(dir.path(), differs);
    let run = |settings: &[&str]| {
        let hf = format!("model.hf_path={:?}", dir.path());
        let settings: Vec<_> = [&*hf].iter().chain(settings).map(|setting| setting.to_string()).collect();
        let config = RunConfig::load(None, &settings).unwrap();
        let weights = Weights::open(&config, None, config.dimensions().unwrap())?;
        let (progress, out) = (ProgressLine::hidden(), &mut std::io::sink());
        prepare::<Llama3, Train>(&config, weights, &Default::default(), &progress, out)
    };
    assert!(run(&[]).unwrap_err().to_string().contains(differs));
    assert!(run(&["model.tie_word_embeddings=true"]).unwrap().lm_head.is_none());
    let own = run(&["model.tie_word_embeddings=false", "training.precision=f32"]).unwrap().lm_head.unwrap();
    let transposed: Vec<f32> = values(own.weight.val().transpose());
    assert_eq!(transposed, floats(stored_tensors(&tiny(), 4).last().unwrap()));
}

/// The shapes do not fit, and the model would not fit in memory.
#[test]
fn shapes_are_compared_before_anything_is_allocated() {
    for huge in [
        tiny_with(|dims| {
            dims.hidden_size = 1 << 24;
            dims.head_dim = 1 << 10
        }),
        tiny_with(|dims| dims.vocab_size = 1 << 32),
    ] {
        assert_refused(folder(&huge, &stored_tensors(&tiny(), 1)).path(), ", the model needs [");
    }
    // The number of positions has no tensor.
    let positions = tiny_with(|dims| dims.max_seq_len = 1 << 36);
    load(folder(&positions, &stored_tensors(&tiny(), 1)).path()).unwrap();
}

#[test]
fn loaded_parameters_are_trainable() {
    let config = tiny();
    let dir = folder(&config, &stored_tensors(&config, 5));
    let model = Llama::<Train>::load_hf(dir.path(), &Default::default()).unwrap();
    assert!(model.norm.gamma.is_require_grad());
    assert!(model.lm_head.unwrap().weight.is_require_grad());
}

#[test]
fn missing_unexpected_and_misshapen_tensors_are_named() {
    const NAME: &str = "model.layers.1.mlp.down_proj.weight";
    let (config, tied) = (tiny(), tiny_with(|dims| dims.tie_word_embeddings = true));
    let refused = |change: &dyn Fn(&mut Vec<Stored>, usize), expected: &str| {
        let mut tensors = stored_tensors(&config, 6);
        let at = tensors.iter().position(|t| t.name == NAME).unwrap();
        change(&mut tensors, at);
        assert_refused(folder(&config, &tensors).path(), expected);
    };
    refused(&|tensors, at| drop(tensors.remove(at)), &format!("lacks the tensor {NAME} [48, 80]"));
    let misshapen = format!("{NAME} has shape [80, 48], the model needs [48, 80]");
    refused(&|tensors, at| tensors[at].shape = vec![80, 48], &misshapen);
    let integers = format!("model.safetensors: {NAME} has dtype I32; ");
    refused(&|tensors, at| tensors[at].dtype = Dtype::I32, &integers);
    let more = |tensors: &mut Vec<Stored>, _| {
        for name in ["2.input_layernorm.weight", "0.self_attn.q_proj.bias", "0.self_attn.rotary_emb.inv_freq"] {
            tensors.push(Stored::f32(&format!("model.layers.{name}"), &[1], &[1.0]));
        }
    };
    let expected = "model.safetensors holds tensors that the model does not have: \
                    model.layers.0.self_attn.q_proj.bias, model.layers.2.input_layernorm.weight";
    refused(&more, expected);
    // An untied model needs an output layer.
    assert_refused(folder(&config, &stored_tensors(&tied, 6)).path(), "lacks the tensor lm_head.weight");
}

#[test]
fn files_that_are_no_checkpoint_are_errors() {
    let config = tiny();
    let dir = folder(&config, &stored_tensors(&config, 7));
    let file = dir.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    let cut = "it is cut, or no safetensors file: it has ";
    for (bytes, expected) in [
        (&whole[..whole.len() - 1], "its header asks for "),
        (&[&whole[..], &[0]].concat(), "its header asks for "),
        (&whole[..100], cut),
        (&whole[..5], "5 bytes are no safetensors file"),
        (&[], "0 bytes are no safetensors file"),
        (&[0xff; 64], cut),
        (b"<!DOCTYPE html><html><body>404</body></html>", "it has 44 bytes, and by its first 8 (\"<!DOCTYP\")"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 247\n", "git lfs pull"),
        (b"\x04\0\0\0\0\0\0\0{]}}", "model.safetensors is not valid"),
    ] {
        fs::write(&file, bytes).unwrap();
        assert_refused(dir.path(), expected);
    }
    fs::remove_file(&file).unwrap();
    assert_refused(dir.path(), " holds neither model.safetensors nor ");
}
