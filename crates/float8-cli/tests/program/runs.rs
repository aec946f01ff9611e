//! Runs that are stopped or killed resume with the same bits, from the requested checkpoint.

use std::fs;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Instant;

use trainer::rng::Rng;

use crate::case::{Case, RECIPES, STEPS, end_of, ended, kill, losses, spawn, wait_for_step};
use crate::support::{small, stderr, stdout, text, train};

/// Signals the case's run after step `step`. Returns the log until then, and the output. The run
/// succeeds if it ends before the signal arrives, since a step takes milliseconds.
fn stop_after(case: Case, step: usize, signal: &str) -> (Case, String, Output) {
    let mut child = spawn(with_hangups(HEARD, &case.train()));
    let log = wait_for_step(&mut child, step);
    kill(&child, signal);
    (case, log, child.wait_with_output().unwrap())
}

const HEARD: &str = "--default-signal=HUP";
/// As under `nohup`.
const IGNORED: &str = "--ignore-signal=HUP";

/// Command with this SIGHUP setting; otherwise it would inherit the tests' setting.
fn with_hangups(setting: &str, command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg(setting).arg(command.get_program()).args(command.get_args());
    env.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    env
}

#[test]
fn a_run_told_to_stop_saves_and_goes_on_with_the_same_bits() {
    let text = Arc::new(text());
    // Not at a multiple of checkpoint.save_steps: before, during and after FP8.
    for (recipe, step, name, code) in
        [("rowwise_with_gw_hp", 3, "INT", 130), ("delayed", 7, "TERM", 143), ("mxfp8", 11, "HUP", 129)]
    {
        let straight = Case::recipe(&text, recipe);
        let expected = losses(stdout(&straight.train().output().unwrap()));
        assert_eq!(expected.len(), STEPS);
        let (case, log, output) = (0..50)
            .map(|_| stop_after(Case::recipe(&text, recipe), step, &format!("-{name}")))
            .find(|(_, _, output)| !output.status.success())
            .expect("a signal that comes before the run ends");
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{recipe}: {error}");
        assert!(error.starts_with(&format!("stopped by SIG{name} after step ")), "{error}");
        let mut made = losses(&(log + str::from_utf8(&output.stdout).unwrap()));
        let last = *made.last_key_value().unwrap().0;
        assert_eq!(case.saved().last().copied(), Some(last as u64), "{recipe}: the step it stopped after is saved");

        let resumed = losses(stdout(&case.resume(&[]).output().unwrap()));
        assert_eq!(resumed.len(), STEPS - last);
        made.extend(resumed);
        assert_eq!(made, expected, "{recipe}");
        assert!(end_of(case.folder()) == end_of(straight.folder()), "{recipe}: parameters, moments or state differ");
    }
}

/// A run without checkpoints, under `nohup`: a hangup does not end it, and an interrupt says that
/// nothing is saved.
#[test]
fn a_run_without_checkpoints_says_that_nothing_is_saved() {
    let text = text();
    let mut child = spawn(with_hangups(IGNORED, &train(&small(&text.1, &["training.steps=100000"]))));
    wait_for_step(&mut child, 3);
    kill(&child, "-HUP");
    wait_for_step(&mut child, 30);
    kill(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let error = stderr(&output);
    assert!(error.starts_with("stopped by SIGINT after step "), "{error}");
    assert!(error.contains("nothing of the run is saved: with --output-dir FOLDER"), "{error}");
    assert_eq!(output.status.code(), Some(130));
}

/// A pipe without a reader is like a closed terminal or a full disk.
#[test]
fn a_run_whose_log_cannot_be_written_is_saved() {
    let case = Case { steps: 100_000, ..Case::new(&["checkpoint.save_steps=0"]) };
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

/// `FLOAT8_KILLS=200 cargo test --release --workspace --test program killed` runs more kills than
/// CI.
#[test]
fn runs_killed_at_random_moments_always_resume_with_the_same_bits() {
    let kills: usize = std::env::var("FLOAT8_KILLS").map_or(20, |kills| kills.parse().unwrap());
    let (text, mut rng) = (Arc::new(text()), Rng::named(0, "kills"));
    let (mut killed, mut while_writing, mut runs) = (0, 0, 0);
    for recipe in RECIPES.iter().cycle() {
        let straight = Case::recipe(&text, recipe);
        let start = Instant::now();
        let expected = losses(stdout(&straight.train().output().unwrap()));
        let whole = start.elapsed();
        let before = killed;
        // Until a run of this recipe was killed.
        while killed == before && killed < kills {
            let case = Case::recipe(&text, recipe);
            loop {
                let mut child = spawn(case.go_on());
                // Early in a run, so that it is killed several times.
                std::thread::sleep(whole.mul_f64(rng.uniform() / if killed < kills { 2.0 } else { 0.01 }));
                let ended = child.try_wait().unwrap().is_some();
                kill(&child, "-KILL");
                let output = child.wait_with_output().unwrap();
                let log = String::from_utf8_lossy(&output.stdout);
                for (step, loss) in losses(&log) {
                    assert_eq!(loss, expected[&step], "{recipe}, step {step}, after {killed} kills");
                }
                if ended {
                    assert!(stdout(&output).contains("validation loss: "), "{log}");
                    break;
                }
                killed += 1;
                let partial = |entry: fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".partial");
                while_writing += usize::from(fs::read_dir(case.folder()).into_iter().flatten().flatten().any(partial));
            }
            assert!(
                end_of(case.folder()) == end_of(straight.folder()),
                "{recipe}: parameters, moments or state differ"
            );
            runs += 1;
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
fn resume_says_what_there_is_to_do() {
    let case = ended(&["checkpoint.save_total_limit=6"]);
    let resume = |arguments: &[&str]| case.resume(arguments).output().unwrap();
    let killed_after = |step: usize, arguments: &[&str]| {
        let longer = ["--steps", "100000", "--set", "optimizer.lr=1e-3", "--set", "checkpoint.save_steps=0"];
        let mut child = spawn(case.resume(&[arguments, &longer].concat()));
        wait_for_step(&mut child, step);
        kill(&child, "-KILL");
        child.wait().unwrap();
    };
    assert!(stdout(&resume(&[])).contains("finished: all 12 steps are done; `--steps` asks for more"));
    assert!(stderr(&resume(&["--steps", "11"])).contains("training.steps = 11: the checkpoint is of step 12"));
    // The settings of a resume count, even if it is killed before its next checkpoint.
    killed_after(14, &[]);
    let output = resume(&["--steps", "14"]);
    let log = stdout(&output);
    assert!(log.contains("changed: optimizer.lr was 0.005, is 0.001\n") && log.contains("step: 14  loss"), "{log}");
    // So does the step that a run went back to.
    killed_after(9, &["--from-step", "8"]);
    assert_eq!(case.saved(), [4, 6, 8, 10, 12, 14]);
    assert!(stdout(&resume(&["--steps", "14"])).contains("resumed: step 8 of "));
    assert_eq!(case.saved(), [4, 6, 8, 14]);

    let remove_all = || {
        for step in case.saved() {
            fs::remove_dir_all(case.folder().join(format!("step-{step:09}"))).unwrap();
        }
    };
    remove_all();
    assert!(stderr(&resume(&[])).contains("has no checkpoint `step-000000014`; there are none"));
    fs::remove_file(case.folder().join("LATEST")).unwrap();
    assert!(stdout(&resume(&[])).starts_with("no checkpoint yet: the run begins again\n"));
    remove_all();
    for name in ["LATEST", "config.toml"] {
        fs::remove_file(case.folder().join(name)).unwrap();
    }
    assert!(stderr(&resume(&[])).contains("holds no run: no config.toml and no checkpoint"));
}
