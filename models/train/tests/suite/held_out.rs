//! Held-out data: a fraction of the data, other files, or none; and the data of `eval`.

use std::fs;
use std::path::Path;

use clap::Parser;
use device_select::SelectedDevice;
use models::{Decoders, Error};
use train::cli::Command;

use crate::common::{
    Train, hf_json, refuses, run, run_config, stored_tensors, text, tiny, write_json, write_safetensors,
};

/// Output of `llama3` with these arguments.
fn llama3(arguments: &[&str]) -> Result<String, Error> {
    let command = Command::try_parse_from([&["llama3"], arguments].concat()).unwrap();
    let mut out = vec![];
    if let Some(job) = command.job::<Decoders>(&mut out)? {
        job.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut out)?;
    }
    Ok(String::from_utf8(out).unwrap())
}

fn line<'a>(log: &'a str, begin: &str) -> &'a str {
    log.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("no {begin} in {log}"))
}

/// Writes a Hugging Face folder of the tiny model with byte tokens.
fn hf(folder: &Path) {
    write_json(&folder.join("config.json"), &hf_json(&tiny()));
    write_safetensors(&folder.join("model.safetensors"), &stored_tensors(&tiny(), 1));
}

#[test]
fn nothing_need_be_held_out() {
    let (data, folder) = (text(), tempfile::tempdir().unwrap());
    let mut config =
        run_config(data.path(), &["data.held_out_fraction=0", "training.steps=2", "training.eval_every=1"]);
    config.checkpoint.folder = Some(folder.path().into());
    let (outcome, log) = run(&config).unwrap();
    assert_eq!((outcome.steps.len(), outcome.held_out_loss, outcome.best_held_out_loss), (2, None, None));
    assert!(!log.contains("held-out") && line(&log, "data: ").ends_with("  held out: 0"), "{log}");
    let folder = folder.path().to_str().unwrap();
    refuses(llama3(&["eval", folder, "--device", "cpu"]), "nothing is held out");
    // Evaluation on other files still works.
    let file = data.path().join("00.rs");
    assert!(llama3(&["eval", folder, "--data", file.to_str().unwrap()]).unwrap().contains("held-out loss: "));
}

/// A run with `data.validation` and `eval --data` give the same loss, over all targets of the file.
/// A fraction of the data would be a few batches.
#[test]
fn a_model_is_judged_by_all_of_other_files() {
    let (data, model) = (text(), tempfile::tempdir().unwrap());
    hf(model.path());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("judge.txt");
    fs::write(&file, "fn other() { text(7) }\n".repeat(41)).unwrap();
    let mut config = run_config(
        data.path(),
        &["training.steps=0", "training.precision=f32", "training.eval_batches=1000", "generate.max_new_tokens=0"],
    );
    config.model = Default::default();
    config.model.hf_path = Some(model.path().into());
    config.data.tokenizer = Some("bytes".into());
    config.data.validation = vec![file.clone()];
    let (outcome, log) = run(&config).unwrap();
    let loss = line(&log, "held-out loss: ");
    let held_out = outcome.held_out_loss.unwrap();
    assert_eq!(loss, format!("held-out loss: {held_out:.5}  perplexity: {:.3}  (943 tokens)", held_out.exp()));
    assert!(
        line(&log, "data: ").starts_with("data: 11 files (11 text)") && log.contains("  held out: 944 (1 document)\n"),
        "{log}"
    );

    let [model, file] = [model.path(), &file].map(|path| path.to_str().unwrap());
    let settings = [
        "data.tokenizer=bytes",
        "training.seq_len=24",
        "training.batch_size=4",
        "training.precision=f32",
        "training.eval_batches=1",
    ];
    let settings: Vec<_> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let eval = |data: &[&str]| llama3(&[&["eval", model, "--device", "cpu"], data, &settings].concat());
    let log = eval(&["--data", file]).unwrap();
    assert_eq!(line(&log, "held-out loss: "), loss);
    assert_eq!(line(&log, "device: "), "device: cpu  precision: f32  compute dtype: f32  attention: tiles");
    assert!(line(&log, "data: ").ends_with("data: 1 file (1 text)  tokens: 944 (1 document)"), "{log}");
    // A Hugging Face checkpoint does not define data.
    refuses(eval(&[]), "says nothing of data");
}
