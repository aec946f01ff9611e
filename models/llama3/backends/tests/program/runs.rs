//! Runs that are stopped, killed, or find their folder changed: they go on with the same bits, or say what is wrong.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use train::rng::Rng;

use crate::support::{command, llama3, small, stderr, stdout, text, train};

const RECIPES: [&str; 7] =
    ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "mxfp8_wgrad_with_hp"];
const STEPS: usize = 12;

/// Text, which runs that are compared have in common: a checkpoint names its files.
type Text = Arc<(TempDir, String)>;

/// A run's text, arguments and folder.
struct Case {
    text: Text,
    settings: Vec<String>,
    steps: usize,
    folder: TempDir,
}

impl Case {
    /// Micro-batches are accumulated, and linears run in FP8 from the fifth step to the tenth.
    fn new(settings: &[&str]) -> Self {
        Self::on(&Arc::new(text()), settings)
    }

    fn on(text: &Text, settings: &[&str]) -> Self {
        let fixed = [
            "training.grad_accumulation=3",
            "float8.schedule={ warmup = 4, cooldown = 2 }",
            "checkpoint.every=2",
            "checkpoint.keep=2",
        ];
        let settings = fixed.iter().chain(settings).map(|setting| setting.to_string()).collect();
        Self { text: text.clone(), settings, steps: STEPS, folder: tempfile::tempdir().unwrap() }
    }

    fn recipe(text: &Text, name: &str) -> Self {
        Self::on(text, &[&format!("float8.recipe={name}")])
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn train(&self) -> Command {
        let settings: Vec<_> = self.settings.iter().map(String::as_str).collect();
        let mut command = train(&small(&self.text.1, &settings));
        let steps = self.steps.to_string();
        command.args(["--steps", &steps, "--checkpoints", self.path()]);
        command
    }

    fn resume(&self, arguments: &[&str]) -> Command {
        command(&[&["resume", self.path()], arguments].concat())
    }

    /// Whichever of the two there is to do.
    fn go_on(&self) -> Command {
        if self.folder().join("config.toml").exists() { self.resume(&[]) } else { self.train() }
    }

    fn path(&self) -> &str {
        self.folder().to_str().unwrap()
    }

    fn saved(&self) -> Vec<u64> {
        train::checkpoint::saved_steps(self.folder()).unwrap()
    }
}

/// For each step its loss and gradient norm as they are printed.
fn losses(log: &str) -> BTreeMap<usize, String> {
    let lines = log.lines().filter(|line| line.contains("  loss: "));
    let step = |line: &str| {
        let (step, rest) = line.strip_prefix("step:")?.split_once("loss:")?;
        Some((step.trim().parse().ok()?, rest.split("memory:").next()?.trim().to_string()))
    };
    lines.filter_map(step).collect()
}

/// What a run has come to, all its bits: parameters, moments and everything else of its last checkpoint.
fn end_of(folder: &Path) -> Vec<Vec<u8>> {
    let last = folder.join(format!("step-{STEPS:09}"));
    ["model.safetensors", "optimizer.safetensors", "state.json"].map(|name| fs::read(last.join(name)).unwrap()).to_vec()
}

fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn kill(child: &Child, signal: &str) {
    let _ = Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
}

fn wait_for_step(child: &mut Child, step: usize) -> String {
    let mut log = Vec::new();
    let mut byte = [0];
    let stdout = child.stdout.as_mut().unwrap();
    let wanted = format!("step: {step:2}  loss");
    while !String::from_utf8_lossy(&log).contains(&wanted) {
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "ended before step {step}: {}", String::from_utf8_lossy(&log));
        log.extend(byte);
    }
    String::from_utf8(log).unwrap()
}

/// Signals the case's run once it has made `step` steps: the log until then, and how it ended. It succeeds if it ends before the signal
/// comes, since a step takes milliseconds.
fn stop_after(case: Case, step: usize, signal: &str) -> (Case, String, Output) {
    let mut child = spawn(with_hangups(HEARD, &case.train()));
    let log = wait_for_step(&mut child, step);
    kill(&child, signal);
    (case, log, child.wait_with_output().unwrap())
}

const HEARD: &str = "--default-signal=HUP";
/// As under `nohup`.
const IGNORED: &str = "--ignore-signal=HUP";

/// The command with SIGHUP set like this. Without, it would inherit what the tests have.
fn with_hangups(setting: &str, command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg(setting).arg(command.get_program()).args(command.get_args());
    env.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    env
}

#[test]
fn a_run_told_to_stop_saves_and_goes_on_with_the_same_bits() {
    let text = Arc::new(text());
    for (i, recipe) in RECIPES.iter().enumerate() {
        let straight = Case::recipe(&text, recipe);
        let expected = losses(stdout(&straight.train().output().unwrap()));
        assert_eq!(expected.len(), STEPS);

        // Not at a multiple of checkpoint.every, before FP8, in it, and after it.
        let step = [3, 7, 11][i % 3];
        let signals = [("-INT", "SIGINT", 130), ("-TERM", "SIGTERM", 143), ("-HUP", "SIGHUP", 129)];
        let (signal, name, code) = signals[i % 3];
        let (case, log, output) = (0..50)
            .map(|_| stop_after(Case::recipe(&text, recipe), step, signal))
            .find(|(_, _, output)| !output.status.success())
            .expect("a signal that comes before the run ends");
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{recipe}: {error}");
        assert!(error.starts_with(&format!("stopped by {name} after step ")), "{error}");
        let log = log + str::from_utf8(&output.stdout).unwrap();
        let made = losses(&log);
        let (last, _) = made.last_key_value().unwrap();
        assert_eq!(case.saved().last().copied(), Some(*last as u64), "{recipe}: the step it stopped after is saved");

        let resumed = losses(stdout(&case.resume(&[]).output().unwrap()));
        assert_eq!(resumed.len(), STEPS - last);
        let all: BTreeMap<_, _> = made.into_iter().chain(resumed).collect();
        assert_eq!(all, expected, "{recipe}");
        assert!(end_of(case.folder()) == end_of(straight.folder()), "{recipe}: parameters, moments or state differ");
    }
}

#[test]
fn a_run_under_nohup_goes_on_without_its_terminal() {
    let text = text();
    let mut child = spawn(with_hangups(IGNORED, &train(&small(&text.1, &["training.steps=100000"]))));
    wait_for_step(&mut child, 3);
    kill(&child, "-HUP");
    wait_for_step(&mut child, 30);
    kill(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert!(stderr(&output).starts_with("stopped by SIGINT after step "), "{}", stderr(&output));
}

/// A pipe whose reader has ended, as a terminal that is closed, or a full disk.
#[test]
fn a_run_whose_log_cannot_be_written_is_saved() {
    let case = Case { steps: 100_000, ..Case::new(&["checkpoint.every=0"]) };
    let mut child = spawn(case.train());
    wait_for_step(&mut child, 3);
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let error = stderr(&output);
    let step = error.strip_prefix("stopped by a log that cannot be written after step ").expect(error);
    let step: u64 = step.split(';').next().unwrap().parse().unwrap();
    assert_eq!((output.status.code(), case.saved()), (Some(1), vec![step]));
    let resumed = case.resume(&["--steps", &(step + 2).to_string()]).output().unwrap();
    assert_eq!(losses(stdout(&resumed)).len(), 2);
}

/// It has nowhere to go on from.
#[test]
fn a_run_without_checkpoints_says_that_nothing_is_saved() {
    let text = text();
    let mut child = spawn(train(&small(&text.1, &["training.steps=100000"])));
    wait_for_step(&mut child, 3);
    kill(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let error = stderr(&output);
    assert!(
        error.starts_with("stopped by SIGINT after step ") && error.contains("nothing of the run is saved"),
        "{error}"
    );
    assert!(error.contains("--checkpoints FOLDER"), "{error}");
    assert_eq!(output.status.code(), Some(130));
}

/// Killed before it has a checkpoint of its own, a run that went back goes on from where it went back to.
#[test]
fn what_a_run_gave_up_by_going_back_is_not_resumed() {
    let case = ended(&["checkpoint.keep=6"]);
    let back = ["--step", "8", "--steps", "100000", "--set", "optimizer.lr=1e-3", "--set", "checkpoint.every=0"];
    let mut child = spawn(case.resume(&back));
    wait_for_step(&mut child, 9);
    kill(&child, "-KILL");
    child.wait().unwrap();
    assert_eq!(case.saved(), [2, 4, 6, 8, 10, 12]);
    let log = case.resume(&["--steps", "14"]).output().unwrap();
    assert!(stdout(&log).contains("resumed: step 8 of "), "{}", stdout(&log));
    assert_eq!(case.saved(), [2, 4, 6, 8, 14]);
}

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

/// `FLOAT8_KILLS=200 cargo test --release --workspace --test program killed` for more than CI does.
#[test]
fn runs_killed_at_random_moments_always_resume_with_the_same_bits() {
    let kills: usize = std::env::var("FLOAT8_KILLS").map_or(20, |kills| kills.parse().unwrap());
    let text = Arc::new(text());
    let mut rng = Rng::named(0, "kills");
    let (mut killed, mut while_writing, mut runs) = (0, 0, 0);
    for recipe in RECIPES.iter().cycle() {
        let straight = Case::recipe(&text, recipe);
        let start = Instant::now();
        let expected = losses(stdout(&straight.train().output().unwrap()));
        let whole = start.elapsed();
        let end = end_of(straight.folder());
        while killed < kills {
            let case = Case::recipe(&text, recipe);
            let before = killed;
            let log = loop {
                let mut child = spawn(case.go_on());
                // In the first third of a run's time, so that one is killed several times.
                std::thread::sleep(whole.mul_f64(rng.uniform() / if killed < kills { 2.0 } else { 0.01 }));
                let ended = child.try_wait().unwrap().is_some();
                kill(&child, "-KILL");
                let output = child.wait_with_output().unwrap();
                let log = String::from_utf8_lossy(&output.stdout).into_owned();
                for (step, loss) in losses(&log) {
                    assert_eq!(loss, expected[&step], "{recipe}, step {step}, after {killed} kills");
                }
                if ended {
                    stdout(&output);
                    break log;
                }
                killed += 1;
                let partial = |entry: fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".partial");
                let entries = fs::read_dir(case.folder()).into_iter().flatten().flatten();
                while_writing += usize::from(entries.into_iter().any(partial));
            };
            assert!(log.contains("held-out loss: "), "{log}");
            assert!(end_of(case.folder()) == end, "{recipe}: parameters, moments or state differ");
            runs += 1;
            if killed - before > 0 {
                break;
            }
        }
        if killed >= kills {
            break;
        }
    }
    println!(
        "{killed} kills of {runs} runs, {while_writing} while a checkpoint was written: all ended with the same bits"
    );
}

#[test]
fn nothing_of_somebody_else_is_removed() {
    let case = Case::new(&[]);
    for name in ["film.partial", "work.partial/precious", ".other.partial"] {
        let path = case.folder().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "precious").unwrap();
    }
    // What interrupted runs leave.
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
fn going_back_keeps_the_best_of_what_is_left() {
    let case = Case::new(&["checkpoint.keep=3", "checkpoint.every=4"]);
    stdout(&case.train().output().unwrap());
    assert_eq!(case.saved(), [4, 8, 12]);
    let worse = ["--step", "8", "--steps", "9", "--set", "optimizer.lr=100", "--set", "optimizer.warmup_steps=0"];
    let schedule = ["--set", "float8.schedule={ warmup = 4 }", "--set", "checkpoint.keep=1"];
    stdout(&case.resume(&[&worse[..], &schedule].concat()).output().unwrap());
    assert_eq!(case.saved(), [8, 9]);
    assert_eq!(train::checkpoint::best(case.folder()).unwrap().unwrap().0, 8);
    assert!(fs::read_to_string(case.folder().join("BEST")).unwrap().starts_with("step-000000008\n"));
}

#[test]
fn resume_says_what_there_is_to_do() {
    let case = ended(&[]);
    let output = case.resume(&[]).output().unwrap();
    assert!(stdout(&output).contains("all 12 steps are made: `--steps` asks for more"), "{}", stdout(&output));
    let output = case.resume(&["--steps", "11"]).output().unwrap();
    assert!(stderr(&output).contains("training.steps = 11: the checkpoint is of step 12"), "{}", stderr(&output));

    // What it was resumed with counts, also if it was killed before its next checkpoint.
    let longer = ["--steps", "100000", "--set", "optimizer.lr=1e-3", "--set", "checkpoint.every=0"];
    let mut child = spawn(case.resume(&longer));
    wait_for_step(&mut child, 14);
    kill(&child, "-KILL");
    child.wait().unwrap();
    let output = case.resume(&["--steps", "14"]).output().unwrap();
    let log = stdout(&output);
    assert!(log.contains("changed: optimizer.lr was 0.005, is 0.001\n") && log.contains("step: 14  loss"), "{log}");

    for step in case.saved() {
        fs::remove_dir_all(case.folder().join(format!("step-{step:09}"))).unwrap();
    }
    let output = case.resume(&[]).output().unwrap();
    let expected = "has no checkpoint `step-000000014`; there are none";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    fs::remove_file(case.folder().join("LATEST")).unwrap();
    let output = case.resume(&[]).output().unwrap();
    assert!(stdout(&output).starts_with("no checkpoint yet: the run begins again\n"), "{}", stdout(&output));
}

#[test]
fn a_folder_is_used_again_for_another_model() {
    // Ended by its data, before the first step.
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
    // To look is allowed.
    while case.saved().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(&running, "-KILL");
    running.wait().unwrap();
    stdout(&case.resume(&["--steps", "16"]).output().unwrap());
    let output = case.train().output().unwrap();
    assert!(stderr(&output).contains("holds a run of 16 steps: `resume` goes on with it"), "{}", stderr(&output));
}

/// A run that has ended, once for all tests that damage copies of it.
fn ended(settings: &[&str]) -> Case {
    let case = Case::new(settings);
    stdout(&case.train().output().unwrap());
    case
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
            // Of a checksum that is not right, the file is to blame.
            assert!(error.contains(name.to_str().unwrap()) || name == "checksums.json", "{damage}: {error}");
            assert!(error.contains("is damaged") && error.contains("step 10: `--step N`"), "{damage}: {error}");
        }
        fs::write(&path, whole).unwrap();
    }
    let whole = end_of(case.folder());
    fs::remove_file(last.join("model.safetensors")).unwrap();
    assert!(stderr(&case.resume(&[]).output().unwrap()).contains("it is missing"));
    stdout(&case.resume(&["--step", "10"]).output().unwrap());
    assert!(end_of(case.folder()) == whole, "made again from step 10");
}

#[test]
fn a_full_disk_costs_no_checkpoint() {
    let case = ended(&["checkpoint.background=false"]);
    let before = end_of(case.folder());
    // Blocks of 512 or 1024 bytes; parameters and moments take more.
    let script = format!("ulimit -f 40; exec \"$0\" resume {} --steps 16", case.path());
    for _ in 0..2 {
        let mut shell = Command::new("sh");
        // Its tokens are where they were.
        shell
            .args(["-c", &script, env!("CARGO_BIN_EXE_llama3")])
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
    // A file in place of the saved configuration.
    let file = case.text.0.path().join("edited.toml");
    let config = fs::read_to_string(case.folder().join("step-000000014/config.toml")).unwrap();
    fs::write(&file, config.replace("seq_len = 16", "seq_len = 32")).unwrap();
    let output = case.resume(&["--config", file.to_str().unwrap()]).output().unwrap();
    assert!(stderr(&output).contains("training.seq_len was 16"), "{}", stderr(&output));
    // A key that is gone is an error there, not where an earlier version has saved it.
    let old = config.replace("[training]\n", "[training]\nsave_fp8_operands = false\n");
    fs::write(&file, &old).unwrap();
    let output = case.resume(&["--config", file.to_str().unwrap()]).output().unwrap();
    assert!(stderr(&output).contains("training.save_fp8_operands is gone"), "{}", stderr(&output));
    fs::write(case.folder().join("config.toml"), &old).unwrap();
    assert!(stdout(&resume(&[])).contains("all 14 steps are made"));
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

    // A bad line is named.
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
    // What the error says can be done.
    let good = good.to_string();
    let resume = ["--step", &good, "--steps", "16", "--set", "optimizer.lr=1e-4", "--set", "float8.schedule.warmup=4"];
    let again = case.resume(&resume).output().unwrap();
    assert!(stdout(&again).contains("held-out loss: "));
}

#[test]
fn the_newest_and_the_best_stay() {
    // The second half makes everything worse.
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
    // Back to the best: what came after it is another run's past. Metrics that cannot be read keep no run from going on.
    let metrics = case.folder().join("metrics.jsonl");
    fs::write(&metrics, "{\"step\": 1}\nnothing\n").unwrap();
    let step = case.saved()[0].to_string();
    let again = case.resume(&["--step", &step, "--steps", "14"]).output().unwrap();
    let log = stdout(&again);
    assert!(log.contains("metrics.jsonl:2: not a line of metrics.jsonl"), "{log}");
    assert_eq!(case.saved().last(), Some(&14));
}
