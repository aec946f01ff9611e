//! Folders of runs: damaged, changed, full or locked ones give errors, and intact files are kept.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::case::{Case, end_of, ended, kill, spawn, wait_for_step};
use crate::support::{llama3, small, stderr, stdout, train};

#[test]
fn a_new_run_does_not_go_on_in_the_folder_of_one_that_diverged() {
    let case =
        Case::new(&["optimizer.lr=1e30", "training.max_norm=inf", "optimizer.warmup_steps=0", "checkpoint.every=0"]);
    assert!(stderr(&case.train().output().unwrap()).contains("diverged"));
    let metrics = fs::read(case.folder().join("metrics.jsonl")).unwrap();
    let output = case.train().output().unwrap();
    assert!(stderr(&output).contains("holds a run that diverged at step "), "{}", stderr(&output));
    assert_eq!(fs::read(case.folder().join("metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn nothing_of_somebody_else_is_removed() {
    let case = Case::new(&[]);
    for name in ["film.partial", "work.partial/precious", ".other.partial"] {
        let path = case.folder().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "precious").unwrap();
    }
    // Leftovers of interrupted runs.
    fs::create_dir(case.folder().join(".step-000000002.partial")).unwrap();
    fs::write(case.folder().join(".LATEST.17.partial"), "").unwrap();
    stdout(&case.train().output().unwrap());
    for name in ["film.partial", "work.partial/precious", ".other.partial"] {
        assert!(case.folder().join(name).exists(), "{name}");
    }
    assert!(!case.folder().join(".step-000000002.partial").exists());
    assert!(!case.folder().join(".LATEST.17.partial").exists());
}

#[test]
fn a_folder_with_files_of_no_run_is_refused() {
    for name in ["config.toml", "assets", "metrics.jsonl"] {
        let case = Case::new(&[]);
        fs::create_dir_all(case.folder()).unwrap();
        fs::write(case.folder().join(name), "precious").unwrap();
        let output = case.train().output().unwrap();
        assert!(stderr(&output).contains(&format!("{name} is of no run")), "{}", stderr(&output));
        assert_eq!(fs::read_to_string(case.folder().join(name)).unwrap(), "precious");
        assert_eq!(fs::read_dir(case.folder()).unwrap().count(), 1, "nothing is written");
    }
}

#[test]
fn a_folder_is_used_again_for_another_model() {
    // This run fails because of its data, before the first step.
    let case = Case::new(&["data.tokenizer=bytes"]);
    let tokenizer = format!("data.tokenizer={}", crate::support::vectors().display());
    let mut first = train(&small("nowhere", &[&tokenizer]));
    assert!(!first.args(["--checkpoints", case.path()]).output().unwrap().status.success());
    assert!(case.folder().join("assets/tokenizer.json").exists());
    assert!(stderr(&case.resume(&[]).output().unwrap()).contains("holds no run"));
    stdout(&case.train().output().unwrap());
    assert!(!case.folder().join("assets/tokenizer.json").exists());
    stdout(&case.resume(&["--steps", "14"]).output().unwrap());
}

#[test]
fn one_folder_has_one_run() {
    let case = Case { steps: 100_000, ..Case::new(&["float8.schedule={ warmup = 0 }"]) };
    let mut running = spawn(case.train());
    wait_for_step(&mut running, 4);
    for mut other in [case.resume(&[]), case.train()] {
        let output = other.output().unwrap();
        let error = stderr(&output);
        assert!(error.contains("another run is writing to ") && error.contains(case.path()), "{error}");
    }
    // Reading is allowed during a run.
    while case.saved().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(&running, "-KILL");
    running.wait().unwrap();
    stdout(&case.resume(&["--steps", "16"]).output().unwrap());
    let output = case.train().output().unwrap();
    assert!(stderr(&output).contains("holds a run of 16 steps: `resume` goes on with it"), "{}", stderr(&output));
}

#[test]
fn damaged_files_are_named_and_an_older_checkpoint_is_taken() {
    let case = ended(&[]);
    assert_eq!(case.saved(), [10, 12]);
    let last = case.folder().join("step-000000012");
    let names: Vec<_> = fs::read_dir(&last).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 5);
    for name in names {
        let path = last.join(&name);
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for (damage, bytes) in [("flipped", &flipped[..]), ("cut", &whole[..whole.len() / 2]), ("emptied", &[])] {
            fs::write(&path, bytes).unwrap();
            let output = case.resume(&[]).output().unwrap();
            let error = stderr(&output);
            // A wrong checksum is reported for the file it belongs to.
            assert!(error.contains(name.to_str().unwrap()) || name == "checksums.json", "{damage}: {error}");
            assert!(error.contains("is damaged") && error.contains("step 10: `--step N`"), "{damage}: {error}");
        }
        fs::write(&path, whole).unwrap();
    }
    let (whole, model) = (end_of(case.folder()), last.join("model.safetensors"));
    // The length is checked before reading.
    fs::File::options().write(true).open(&model).unwrap().set_len(1 << 40).unwrap();
    assert!(stderr(&case.resume(&[]).output().unwrap()).contains("it has 1099511627776 bytes, "));
    fs::remove_file(model).unwrap();
    assert!(stderr(&case.resume(&[]).output().unwrap()).contains("it is missing"));
    stdout(&case.resume(&["--step", "10"]).output().unwrap());
    assert!(end_of(case.folder()) == whole, "made again from step 10");
}

/// Covers files of a checkpoint and of a run's assets. A file without a checksum is refused.
#[test]
fn checksums_cover_every_file_that_is_read() {
    let case = ended(&[&format!("data.tokenizer={}", crate::support::vectors().display())]);
    let last = case.folder().join("step-000000012");
    let edited = |name: &str, edit: &dyn Fn(&str) -> String| {
        let path = case.folder().join(name);
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, edit(&whole)).unwrap();
        let output = case.resume(&[]).output().unwrap();
        fs::write(path, whole).unwrap();
        stderr(&output).to_string()
    };
    let error = edited("assets/tokenizer.json", &|text| text.replacen('a', "b", 1));
    assert!(error.contains("assets/tokenizer.json is damaged: its SHA-256"), "{error}");
    for name in ["assets/checksums.json", "step-000000012/checksums.json"] {
        let error = edited(name, &|_| r#"{"held_out_loss": null, "files": {}}"#.into());
        assert!(error.contains("is damaged: checksums.json does not list it"), "{error}");
    }
    // A state with a valid checksum that lacks the steps of the moments' parameters.
    let (state, sums) = (last.join("state.json"), last.join("checksums.json"));
    let text = fs::read_to_string(&state).unwrap();
    let begin = text.find("\"parameter_steps\":{").unwrap();
    let end = begin + text[begin..].find('}').unwrap() + 1;
    let [was, list] = [train::digest_of_file(&state).unwrap(), fs::read_to_string(&sums).unwrap()];
    fs::write(&state, [&text[..begin], "\"parameter_steps\":{}", &text[end..]].concat()).unwrap();
    let list = list.replace(&was, &train::digest_of_file(&state).unwrap());
    let list = list.replace(&text.len().to_string(), &fs::metadata(&state).unwrap().len().to_string());
    fs::write(&sums, list).unwrap();
    let output = case.resume(&[]).output().unwrap();
    assert!(stderr(&output).contains("optimizer.safetensors holds tensors"), "{}", stderr(&output));
}

/// Links are not followed, and pipes do not block.
#[cfg(unix)]
#[test]
fn a_run_writes_nothing_outside_its_folder() {
    let case = ended(&[]);
    let outside = case.text.0.path().join("outside");
    fs::write(&outside, "theirs").unwrap();
    for name in ["LOCK", "LATEST", "metrics.jsonl"] {
        let path = case.folder().join(name);
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&outside, &path).unwrap();
        let linked = case.resume(&["--steps", "14"]).output().unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let piped = case.resume(&["--steps", "14"]).output().unwrap();
        for (output, why) in [(linked, "it is a link"), (piped, "it is a pipe")] {
            assert!(stderr(&output).contains(name) && stderr(&output).contains(why), "{}", stderr(&output));
        }
        assert_eq!(fs::read_to_string(&outside).unwrap(), "theirs");
        fs::remove_file(&path).unwrap();
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(case.saved(), [10, 12]);
}

/// Foreign folders named like checkpoints are kept.
#[test]
fn a_resumed_run_does_what_a_kill_left_undone() {
    let case = ended(&[]);
    let notes = ["LATEST", "BEST"].map(|name| case.folder().join(name));
    let whole = notes.clone().map(|note| fs::read_to_string(note).unwrap());
    fs::write(&notes[0], "step-000000010\n").unwrap();
    fs::remove_file(&notes[1]).unwrap();
    for stray in ["step-99", "step-000000099", "diverged-7", "step-000000014"] {
        fs::create_dir(case.folder().join(stray)).unwrap();
        fs::write(case.folder().join(stray).join("precious"), "").unwrap();
    }
    assert!(stdout(&case.resume(&[]).output().unwrap()).contains("finished: all 12 steps are made"));
    assert_eq!(notes.map(|note| fs::read_to_string(note).unwrap()), whole);
    stdout(&case.resume(&["--steps", "14"]).output().unwrap());
    assert_eq!(case.saved(), [12, 14]);
    assert!(case.folder().join("step-000000099/precious").exists());
    let aside = |name: &str| name.starts_with("not-of-this-run-step-000000014-");
    let names = fs::read_dir(case.folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| aside(name)).count(), 1, "a folder in the way of a checkpoint is kept");
}

/// Without held-out data nothing else shows it, and a step's loss is computed before its update.
#[test]
fn parameters_that_are_not_finite_replace_no_checkpoint() {
    for dtype in ["f32", "bf16"] {
        let nothing = ["data.held_out_fraction=0", "checkpoint.keep=1", "checkpoint.every=1"];
        let dtype = format!("training.param_dtype={dtype}");
        let case = ended(&[&nothing[..], &[&dtype]].concat());
        let resume = ["--steps", "13", "--set", "optimizer.lr=1e300"];
        let output = case.resume(&resume).output().unwrap();
        let error = stderr(&output);
        assert!(error.contains("training diverged: ") && error.contains("is not finite after step 13"), "{error}");
        assert_eq!(case.saved(), [12]);
        let metrics = fs::read_to_string(case.folder().join("metrics.jsonl")).unwrap();
        assert!(metrics.lines().last().unwrap().contains("\"diverged\":\"training diverged"), "{metrics}");
        stdout(&case.resume(&["--steps", "14", "--set", "optimizer.lr=1e-3"]).output().unwrap());
        assert_eq!(case.saved(), [14]);
    }
}

#[test]
fn a_full_disk_costs_no_checkpoint() {
    let case = ended(&["checkpoint.background=false"]);
    let before = end_of(case.folder());
    // Blocks of 512 or 1024 bytes; parameters and moments need more.
    let script = format!("ulimit -f 40; exec \"$0\" resume {} --steps 16", case.path());
    for _ in 0..2 {
        let mut shell = Command::new("sh");
        // Keeps the token cache of the first run.
        shell
            .args(["-c", &script, env!("CARGO_BIN_EXE_float8")])
            .envs(case.train().get_envs().flat_map(|(k, v)| Some((k, v?))));
        let output = shell.output().unwrap();
        let error = stderr(&output);
        assert!(error.contains("cannot write ") && error.contains("safetensors: make room"), "{error}");
        assert!(end_of(case.folder()) == before);
        let left = fs::read_dir(case.folder()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with(".partial")));
    }
    stdout(&case.resume(&["--steps", "16"]).output().unwrap());
    assert_eq!(case.saved(), [14, 16]);
}

#[test]
fn a_changed_key_is_named_with_both_values() {
    let case = ended(&[]);
    let resume = |arguments: &[&str]| case.resume(&[arguments, &["--steps", "14"]].concat()).output().unwrap();
    for (setting, key, saved, now) in [
        ("training.seq_len=8", "training.seq_len", "16", "8"),
        ("training.seed=1", "training.seed", "0", "1"),
        ("float8.recipe=rowwise", "float8.recipe", "\"tensorwise\"", "\"rowwise\""),
        ("model.num_layers=2", "model.num_layers", "1", "2"),
        ("data.tokenizer=bytes", "data.tokenizer", "absent", "\"bytes\""),
        ("optimizer.betas=[0.9, 0.99]", "optimizer.betas", "[0.9, 0.95]", "[0.9, 0.99]"),
    ] {
        let output = resume(&["--set", setting]);
        let expected = format!("{key} was {saved} when the checkpoint was made and is {now} now");
        assert!(stderr(&output).contains(&expected), "{}", stderr(&output));
    }
    let output = resume(&["--set", "optimizer.lr=1e-3", "--set", "training.log_every=2"]);
    let log = stdout(&output);
    for line in ["optimizer.lr was 0.005, is 0.001", "training.log_every was 1, is 2", "training.steps was 12, is 14"] {
        assert!(log.contains(&format!("changed: {line}\n")), "{log}");
    }
    assert!(log.contains("step: 14  loss"), "{log}");
    // A file instead of the saved configuration.
    let file = case.text.0.path().join("edited.toml");
    let config = fs::read_to_string(case.folder().join("step-000000014/config.toml")).unwrap();
    fs::write(&file, config.replace("seq_len = 16", "seq_len = 32")).unwrap();
    let output = case.resume(&["--config", file.to_str().unwrap()]).output().unwrap();
    assert!(stderr(&output).contains("training.seq_len was 16"), "{}", stderr(&output));
    assert!(stdout(&resume(&[])).contains("finished: all 14 steps are made"));
    // A checkpoint with another format version and valid checksums.
    let [state, sums] = ["state.json", "checksums.json"].map(|file| case.folder().join("step-000000014").join(file));
    let [text, digests] = [&state, &sums].map(|file| fs::read_to_string(file).unwrap());
    let was = train::digest_of_file(&state).unwrap();
    fs::write(&state, text.replace("\"format\":2", "\"format\":1")).unwrap();
    fs::write(&sums, digests.replace(&was, &train::digest_of_file(&state).unwrap())).unwrap();
    let output = case.resume(&["--steps", "16"]).output().unwrap();
    assert!(stderr(&output).contains("state.json") && stderr(&output).contains("format 1"), "{}", stderr(&output));
}

#[test]
fn data_that_changed_is_named_and_may_lie_elsewhere() {
    let case = ended(&[]);
    let (text, moved) = (Path::new(&case.text.1), case.text.0.path().join("moved.rs"));
    fs::rename(text, &moved).unwrap();
    let steps = ["--steps", "14"];
    let missing = case.resume(&steps).output().unwrap();
    assert!(stderr(&missing).contains("cannot read ") && stderr(&missing).contains("text.rs"), "{}", stderr(&missing));
    let elsewhere = case.resume(&[&steps[..], &["--data", moved.to_str().unwrap()]].concat()).output().unwrap();
    assert!(stdout(&elsewhere).contains("step: 14  loss"));

    let whole = fs::read_to_string(&moved).unwrap();
    for (other, difference) in [
        (whole.clone() + "more\n", "bytes, now it has"),
        (whole.replacen("one", "two", 1), "it has the same size but other content"),
    ] {
        fs::write(&moved, other).unwrap();
        let output = case.resume(&["--steps", "16"]).output().unwrap();
        let error = stderr(&output);
        let expected = format!("{} changed since the checkpoint: ", moved.display());
        assert!(error.contains(&expected) && error.contains(difference), "{error}");
    }
    assert_eq!(case.saved().last(), Some(&14));

    // An invalid line is named.
    let lines = case.text.0.path().join("lines.jsonl");
    fs::write(&lines, "{\"text\": \"fine\"}\n{\"text\": 1}\n").unwrap();
    let output = train(&small(lines.to_str().unwrap(), &[])).output().unwrap();
    assert!(stderr(&output).contains("lines.jsonl:2: `text` is a number, expected text"), "{}", stderr(&output));
}

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint() {
    let case = ended(&[]);
    let resume = ["--steps", "40", "--set", "optimizer.lr=1e30", "--set", "training.log_every=7"];
    let output = case.resume(&resume).output().unwrap();
    let error = stderr(&output);
    assert!(error.contains("training diverged at step ") || error.contains("held-out loss = NaN"), "{error}");
    let good = *case.saved().last().unwrap();
    let diverged = fs::read_dir(case.folder()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(diverged.into_iter().any(|name| name.to_string_lossy().starts_with("diverged-")));
    if !error.contains("held-out loss") {
        let advice = format!("{good}; `resume {} --step N` goes on from one, and may lower optimizer.lr", case.path());
        assert!(error.contains(&advice), "{error}");
    }
    let metrics = fs::read_to_string(case.folder().join("metrics.jsonl")).unwrap();
    assert!(metrics.lines().last().unwrap().contains("\"diverged\":\"training diverged"), "{metrics}");
    // Follows the advice of the error.
    let good = good.to_string();
    let resume = ["--step", &good, "--steps", "16", "--set", "optimizer.lr=1e-4", "--set", "float8.schedule.warmup=4"];
    let again = case.resume(&resume).output().unwrap();
    assert!(stdout(&again).contains("held-out loss: "));
}

#[test]
fn the_newest_and_the_best_stay() {
    // The second half increases the loss.
    let case = ended(&["checkpoint.keep=1", "optimizer.lr=1e-2"]);
    let (best, loss) = train::checkpoint::best(case.folder()).unwrap().unwrap();
    let worse = ["--steps", "20", "--set", "optimizer.lr=3e-1", "--set", "optimizer.decay=constant"];
    stdout(&case.resume(&worse).output().unwrap());
    assert_eq!(case.saved(), [best, 20]);
    assert_eq!(train::checkpoint::best(case.folder()).unwrap(), Some((best, loss)));
    assert_eq!(fs::read_to_string(case.folder().join("LATEST")).unwrap(), "step-000000020\n");
    let eval = |arguments: &[&str]| -> Output { llama3(&[&["eval", case.path()], arguments].concat()) };
    let (newest, best) = (eval(&[]), eval(&["--best"]));
    assert!(stdout(&best).contains(&format!("held-out loss: {loss:.5}")), "{}", stdout(&best));
    assert_ne!(stdout(&best), stdout(&newest));
    // Resumes from the best checkpoint: later ones no longer count. Unreadable metrics do not stop
    // a run.
    let metrics = case.folder().join("metrics.jsonl");
    fs::write(&metrics, "{\"step\": 1}\nnothing\n").unwrap();
    let step = case.saved()[0].to_string();
    let again = case.resume(&["--step", &step, "--steps", "14"]).output().unwrap();
    let log = stdout(&again);
    assert!(log.contains("metrics.jsonl:2: not a line of metrics.jsonl"), "{log}");
    assert_eq!(case.saved().last(), Some(&14));
}
