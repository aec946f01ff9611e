//! Held-out data: a fraction of the data, other files, or none; and the data of `eval`.

use crate::common::*;

fn line<'a>(log: &'a str, begin: &str) -> &'a str {
    log.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("no {begin} in {log}"))
}

#[test]
fn nothing_need_be_held_out() {
    let (data, folder) = (text(), tempfile::tempdir().unwrap());
    let settings = ["data.validation_split=0", "training.steps=2", "training.eval_every=1"];
    let mut config = run_config(data.path(), &settings);
    config.checkpoint.output_dir = Some(folder.path().into());
    let (outcome, log) = run(&config).unwrap();
    assert_eq!((outcome.steps.len(), outcome.validation_loss, outcome.best_validation_loss), (2, None, None));
    assert!(!log.contains("validation") && line(&log, "data: ").ends_with("  held out: 0"), "{log}");
    let folder = folder.path().to_str().unwrap();
    let error = float8(&["eval", folder, "--device", "cpu"]).unwrap_err().to_string();
    assert!(error.starts_with("nothing is held out (data.validation_split = 0)"), "{error}");
    // Evaluation on other files still works.
    let file = data.path().join("00.rs");
    assert!(float8(&["eval", folder, "--data", file.to_str().unwrap()]).unwrap().contains("validation loss: "));
}

/// A run with `data.validation` and `eval --data` give the same loss, over all targets of the file.
/// A fraction of the data would be a few batches.
#[test]
fn a_model_is_judged_by_all_of_other_files() {
    let (data, folder, base) = (text(), TempDir::new().unwrap(), hf_folder(&tiny(), &stored_tensors(&tiny(), 1)));
    let (model, file) = (base.path().to_path_buf(), folder.path().join("judge.txt"));
    fs::write(&file, "fn other() { text(7) }\n".repeat(41)).unwrap();
    let settings = ["training.steps=0", "training.precision=f32", "training.eval_batches=1000", "data.tokenizer=bytes"];
    let mut config = run_config(data.path(), &[&settings[..], &["generate.max_new_tokens=0"]].concat());
    config.model = Default::default();
    config.model.hf_path = Some(model.clone());
    config.data.validation = vec![file.clone()];
    let (outcome, log) = run(&config).unwrap();
    let loss = line(&log, "validation loss: ");
    let mean = outcome.validation_loss.unwrap();
    assert_eq!(loss, format!("validation loss: {mean:.5}  perplexity: {:.3}  (943 tokens)", mean.exp()));
    let data = line(&log, "data: ");
    assert!(data.starts_with("data: 11 files (11 text)") && data.ends_with("  held out: 944 (1 document)"), "{log}");

    let settings = [&settings[..3], &["data.tokenizer=bytes", "training.seq_len=24", "training.batch_size=4"]].concat();
    let settings: Vec<_> = settings[1..].iter().flat_map(|setting| ["--set", setting]).collect();
    let [model, file] = [&model, &file].map(|path| path.to_str().unwrap());
    let eval = |data: &[&str]| float8(&[&["eval", model, "--device", "cpu"], data, &settings].concat());
    let log = eval(&["--data", file]).unwrap();
    assert_eq!(line(&log, "validation loss: "), loss);
    assert_eq!(line(&log, "device: "), "device: cpu  precision: f32  compute dtype: f32  attention: tiles");
    assert!(line(&log, "data: ").ends_with("data: 1 file (1 text)  tokens: 944 (1 document)"), "{log}");
    let error = eval(&[]).unwrap_err().to_string();
    assert!(error.starts_with("a Hugging Face checkpoint says nothing of data"), "{error}");
}
