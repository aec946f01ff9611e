//! Runs resumed from damaged, changed or full folders: errors name the cause, and intact
//! checkpoints are kept.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::case::{Case, end_of, ended};
use crate::support::{float8, stderr, stdout};

fn error_of(case: &Case, arguments: &[&str]) -> String {
    stderr(&case.resume(arguments).output().unwrap()).to_string()
}

fn log_of(case: &Case, arguments: &[&str]) -> String {
    stdout(&case.resume(arguments).output().unwrap()).to_string()
}

fn metrics(case: &Case) -> String {
    fs::read_to_string(case.folder().join("metrics.jsonl")).unwrap()
}

#[test]
fn a_damaged_run_is_named_and_goes_on_from_an_older_checkpoint() {
    let case = ended(&[&format!("data.tokenizer={}", crate::support::vectors().display())]);
    assert_eq!(case.saved(), [10, 12]);
    let whole = end_of(case.folder());
    let path = |name: &str| case.folder().join(name);
    let edited = |name: &str, edit: &dyn Fn(&str) -> String, expected: &str| {
        let whole = fs::read_to_string(path(name)).unwrap();
        fs::write(path(name), edit(&whole)).unwrap();
        let error = error_of(&case, &[]);
        fs::write(path(name), whole).unwrap();
        assert!(error.contains(expected), "{error}");
    };
    let flip = |text: &str| text.replacen('a', "b", 1);
    edited("assets/tokenizer.json", &flip, "assets/tokenizer.json is damaged: its SHA-256");
    let empty = |_: &str| r#"{"validation_loss": null, "files": {}}"#.to_string();
    edited("assets/checksums.json", &empty, "is damaged: checksums.json does not list it");
    // A state with a valid checksum that lacks the steps of the moments' parameters.
    let state = path("step-000000012/state.json");
    let [text, was] = [fs::read_to_string(&state).unwrap(), trainer::digest_of_file(&state).unwrap()];
    let begin = text.find("\"parameter_steps\":{").unwrap();
    let end = begin + text[begin..].find('}').unwrap() + 1;
    let less = [&text[..begin], "\"parameter_steps\":{}", &text[end..]].concat();
    fs::write(&state, &less).unwrap();
    let now = trainer::digest_of_file(&state).unwrap();
    let list = |list: &str| list.replace(&was, &now).replace(&text.len().to_string(), &less.len().to_string());
    edited("step-000000012/checksums.json", &list, "optimizer.safetensors holds tensors");

    log_of(&case, &["--from-step", "10"]);
    assert!(end_of(case.folder()) == whole, "made again from step 10");
}

#[test]
fn a_resumed_run_does_what_a_kill_left_undone() {
    let case = ended(&[]);
    let notes = ["LATEST", "BEST"].map(|name| case.folder().join(name));
    let whole = notes.clone().map(|note| fs::read_to_string(note).unwrap());
    fs::write(&notes[0], "step-000000010\n").unwrap();
    fs::remove_file(&notes[1]).unwrap();
    assert!(log_of(&case, &[]).contains("finished: all 12 steps are done"));
    assert_eq!(notes.map(|note| fs::read_to_string(note).unwrap()), whole);
}

/// Without validation data nothing else shows it, and a step's loss is computed before its update.
#[test]
fn parameters_that_are_not_finite_replace_no_checkpoint() {
    for dtype in ["f32", "bf16"] {
        let dtype = format!("training.param_dtype={dtype}");
        let case =
            ended(&["data.validation_split=0", "checkpoint.save_total_limit=1", "checkpoint.save_steps=1", &dtype]);
        let error = error_of(&case, &["--steps", "13", "--set", "optimizer.lr=1e300"]);
        assert!(error.contains("training diverged: ") && error.contains("is not finite after step 13"), "{error}");
        assert_eq!(case.saved(), [12]);
        assert!(metrics(&case).lines().last().unwrap().contains("\"diverged\":\"training diverged"));
        log_of(&case, &["--steps", "14", "--set", "optimizer.lr=1e-3"]);
        assert_eq!(case.saved(), [14]);
    }
}

#[test]
fn a_full_disk_costs_no_checkpoint() {
    let case = ended(&["checkpoint.background=false"]);
    let before = end_of(case.folder());
    // Blocks of 512 or 1024 bytes; parameters and moments need more.
    let script = format!("ulimit -f 40; exec \"$0\" resume {} --steps 16", case.path());
    let mut shell = Command::new("sh");
    // Keeps the token cache of the first run.
    shell
        .args(["-c", &script, env!("CARGO_BIN_EXE_float8")])
        .envs(case.train().get_envs().flat_map(|(k, v)| Some((k, v?))));
    let output = shell.output().unwrap();
    let error = stderr(&output);
    assert!(error.contains("lower checkpoint.save_total_limit; checkpoints that were there are whole"), "{error}");
    assert!(error.contains("cannot write ") && error.contains(".safetensors"), "{error}");
    assert!(end_of(case.folder()) == before);
    let left = fs::read_dir(case.folder()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with(".partial")));
    log_of(&case, &["--steps", "16"]);
    assert_eq!(case.saved(), [14, 16]);
}

#[test]
fn what_changed_since_the_checkpoint_is_told() {
    let case = ended(&[]);
    // The same data may lie elsewhere.
    let (text, moved) = (Path::new(&case.text.1), case.text.0.path().join("moved.rs"));
    fs::rename(text, &moved).unwrap();
    let error = error_of(&case, &["--steps", "14"]);
    assert!(error.contains("cannot read ") && error.contains("text.rs"), "{error}");
    let settings = ["--set", "optimizer.lr=1e-3", "--set", "training.log_every=2"];
    let log = log_of(&case, &[&settings[..], &["--steps", "14", "--data", moved.to_str().unwrap()]].concat());
    for line in ["optimizer.lr was 0.005, is 0.001", "training.log_every was 1, is 2", "training.steps was 12, is 14"] {
        assert!(log.contains(&format!("changed: {line}\n")), "{log}");
    }
    assert!(log.contains("step: 14  loss"), "{log}");
    fs::write(&moved, fs::read_to_string(&moved).unwrap() + "more\n").unwrap();
    let error = error_of(&case, &["--steps", "16"]);
    assert!(error.contains("moved.rs changed since the checkpoint: "), "{error}");
    // A file instead of the saved configuration.
    let file = case.text.0.path().join("edited.toml");
    let config = fs::read_to_string(case.folder().join("step-000000014/config.toml")).unwrap();
    fs::write(&file, config.replace("seq_len = 16", "seq_len = 32")).unwrap();
    let error = error_of(&case, &["--config", file.to_str().unwrap()]);
    assert!(error.contains("training.seq_len was 16 when the checkpoint was made and is 32 now"), "{error}");
}

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint() {
    let case = ended(&[]);
    let error = error_of(&case, &["--steps", "40", "--set", "optimizer.lr=1e30", "--set", "training.log_every=7"]);
    assert!(error.contains("training diverged at step ") || error.contains("validation loss = NaN"), "{error}");
    let good = case.saved().last().unwrap().to_string();
    let names = fs::read_dir(case.folder()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().any(|name| name.to_string_lossy().starts_with("diverged-")));
    if !error.contains("validation loss") {
        let advice = format!(
            "{good}; `float8 resume {} --from-step N` continues from one, and may lower optimizer.lr",
            case.path()
        );
        assert!(error.contains(&advice), "{error}");
    }
    assert!(metrics(&case).lines().last().unwrap().contains("\"diverged\":\"training diverged"));
    // Follows the advice of the error.
    let settings = ["--set", "optimizer.lr=1e-4", "--set", "float8.schedule.warmup=4"];
    let log = log_of(&case, &[&["--from-step", &good, "--steps", "16"], &settings[..]].concat());
    assert!(log.contains("validation loss: "));
}

/// Unreadable metrics do not stop a run.
#[test]
fn the_best_is_evaluated_and_resumed() {
    let case = ended(&["checkpoint.save_total_limit=1", "optimizer.lr=1e-2"]);
    let (best, loss) = trainer::checkpoint::best(case.folder()).unwrap().unwrap();
    // The second half increases the loss.
    log_of(&case, &["--steps", "20", "--set", "optimizer.lr=3e-1", "--set", "optimizer.decay=constant"]);
    assert_eq!(case.saved(), [best, 20]);
    let told = float8(&["eval", case.path(), "--best"]);
    assert!(stdout(&told).contains(&format!("validation loss: {loss:.5}")), "{}", stdout(&told));
    fs::write(case.folder().join("metrics.jsonl"), "{\"step\": 1}\nnothing\n").unwrap();
    let log = log_of(&case, &["--from-step", &best.to_string(), "--steps", "14"]);
    assert!(log.contains("metrics.jsonl:2: not a line of metrics.jsonl"), "{log}");
    assert_eq!(case.saved().last(), Some(&14));
}
