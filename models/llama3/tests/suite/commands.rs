//! What command lines ask for: precision, seeds and checkpoints of folders that are there, lengths in epochs, sizes in bytes.

use std::fs;
use std::path::Path;

use clap::Parser;
use llama3::{Error, Llama3, LlamaConfig};
use serde_json::json;
use tempfile::TempDir;
use train::cli::{Command, parse_from};
use train::config::Precision;
use train::hf::ExportOptions;
use train::job::{Job, Task};

use crate::common::{hf_json, stored_tensors, tiny, write_json, write_safetensors};

fn job(arguments: &[&str]) -> Result<Job<Llama3>, Error> {
    let command = Command::try_parse_from([&["llama3"], arguments].concat()).unwrap();
    command.job(&mut std::io::sink()).map(|job| job.expect("the command has something to do with a model"))
}

fn folder(config: &LlamaConfig, dtype: Option<&str>) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let mut json = hf_json(config);
    json["torch_dtype"] = json!(dtype);
    write_json(&dir.path().join("config.json"), &json);
    write_safetensors(&dir.path().join("model.safetensors"), &stored_tensors(config, 1));
    let path = dir.path().display().to_string();
    (dir, path)
}

#[test]
fn a_hugging_face_checkpoint_computes_in_its_own_dtype() {
    for (dtype, precision) in [
        (Some("bfloat16"), Precision::Bf16),
        (Some("float32"), Precision::F32),
        // Nothing computes in f16: f32 has all of its values.
        (Some("float16"), Precision::F32),
        // The weights are f32.
        (None, Precision::F32),
    ] {
        let (_dir, path) = folder(&tiny(), dtype);
        for command in [&["eval", &path, "--data", &path][..], &["generate", &path]] {
            let of = |arguments: &[&str]| {
                let job = job(&[command, arguments].concat()).unwrap();
                (job.config.training.precision, job.start.may_widen)
            };
            assert_eq!(of(&[]), (precision, true), "{command:?} {dtype:?}");
            assert_eq!(of(&["--precision", "fp8"]), (Precision::Fp8, false));
            assert_eq!(of(&["--set", "training.precision=bf16"]), (Precision::Bf16, false));
            assert_eq!(of(&["--set", "training.precision=bf16", "--precision", "f32"]).0, Precision::F32);
        }
    }
}

#[test]
fn a_hugging_face_checkpoint_has_no_steps() {
    let (_dir, path) = folder(&tiny(), None);
    for (flags, named) in [(&["--step", "8"][..], "--step 8"), (&["--best"], "--best")] {
        for command in ["eval", "generate"] {
            let error = job(&[&[command, &path], flags].concat()).unwrap_err();
            assert!(matches!(&error, Error::NotARun { flag, .. } if flag == named), "{error}");
        }
    }
    let error = job(&["generate", "/no/such/folder"]).unwrap_err();
    assert_eq!(error.to_string(), "there is no folder /no/such/folder");
}

#[test]
fn each_call_draws_anew_unless_it_has_a_seed() {
    let (_dir, path) = folder(&tiny(), None);
    let seed = |arguments: &[&str]| job(&[&["generate", &path], arguments].concat()).unwrap().config.training.seed;
    assert_ne!(seed(&[]), seed(&[]));
    assert_eq!(seed(&["--seed", "5"]), 5);
    assert_eq!(seed(&["--set", "training.seed=6"]), 6);
}

#[test]
fn sizes_of_shards_may_have_units() {
    let (_dir, path) = folder(&tiny(), None);
    let export = |size: &str| {
        Command::try_parse_from(["llama3", "export", &path, "out", "--max-shard-bytes", size])
            .map(|command| command.job::<Llama3>(&mut std::io::sink()).unwrap().unwrap().task)
    };
    let sizes = [("5000", 5000), ("5MB", 5_000_000), ("1.5 GB", 1_500_000_000), ("2KiB", 2048), ("3GiB", 3 << 30)];
    for (size, bytes) in sizes {
        let Ok(Task::Export { options: ExportOptions { max_shard_bytes, .. }, .. }) = export(size) else {
            panic!("{size}")
        };
        assert_eq!(max_shard_bytes, bytes, "{size}");
    }
    for size in ["", "5 cats", "MB", "0", "-1", "0.1"] {
        assert!(export(size).is_err(), "{size}");
    }
}

#[test]
fn the_program_says_its_version() {
    let error = parse_from::<Llama3>("llama3", vec!["llama3".into(), "--version".into()]).unwrap_err();
    assert_eq!(error.to_string(), format!("llama3 {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_length_may_be_in_epochs() {
    let steps = |arguments: &[&str]| job(&[&["train"], arguments].concat()).unwrap().config.training.steps;
    assert_eq!(steps(&["--set", "training.steps=3 epochs"]), "3 epochs".parse().unwrap());
    assert_eq!(steps(&["--steps", "1 epoch"]), "1 epoch".parse().unwrap());
    // How many steps it has is not known: what depends on that is not refused yet.
    let schedule = ["--set", "float8.schedule={ warmup = 700 }", "--set", "profile.start=700"];
    let epochs = ["--set", "training.steps=2 epochs"];
    assert_eq!(steps(&[&epochs[..], &schedule].concat()).epochs(), Some(2.0));
    assert!(job(&["train", "--set", "float8.schedule={ warmup = 700 }"]).is_err());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, "[training]\nsteps = \"2 epochs\"\n").unwrap();
    assert_eq!(steps(&["--config", Path::to_str(&path).unwrap()]).epochs(), Some(2.0));
}
