//! Runs over several ranks, started by `mpirun`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{command, set, small, stderr, stdout, text};

fn mpirun() -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe"]).env("RAYON_NUM_THREADS", "1");
    mpirun
}

fn add(mpirun: &mut Command, program: &Command) {
    mpirun.arg(program.get_program()).args(program.get_args());
    mpirun.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
}

/// Runs the program on `count` ranks.
fn float8(count: usize, subcommand: &str, arguments: &[String]) -> Output {
    let (mut mpirun, mut program) = (mpirun(), command(&[subcommand]));
    program.args(arguments);
    mpirun.args(["-n", &count.to_string()]);
    add(&mut mpirun, &program);
    mpirun.output().expect("mpirun is installed (apt: openmpi-bin)")
}

/// Losses of the steps, then the validation loss.
fn losses(output: &Output) -> Vec<f64> {
    let after = |line: &str, word: &str| line.split_once(word)?.1.split_whitespace().next()?.parse().ok();
    let of = |begin: &str, word: &str| -> Vec<f64> {
        stdout(output).lines().filter(|line| line.starts_with(begin)).filter_map(|line| after(line, word)).collect()
    };
    [of("step:", "  loss:"), of("validation", "loss:")].concat()
}

/// Text, and the folders of runs.
struct Runs((TempDir, String));

impl Runs {
    fn new() -> Self {
        Self(text())
    }

    fn path(&self, name: &str) -> String {
        self.0.0.path().join(name).display().to_string()
    }

    /// Size of a tensor file.
    fn bytes(&self, name: &str) -> u64 {
        fs::metadata(self.path(&format!("{name}.safetensors"))).unwrap().len()
    }

    /// Losses of a run whose ranks, times the accumulated micro-batches, are `batches`.
    fn train(&self, [count, batches]: [usize; 2], settings: &[&str]) -> Vec<f64> {
        let accumulation = format!("training.grad_accumulation={}", batches / count);
        losses(&float8(count, "train", &small(&self.0.1, &[settings, &[&accumulation]].concat())))
    }

    /// Losses of a saved run of four steps that a copy resumes after the second.
    fn resume(&self, counts: [usize; 2], run: &str) -> Vec<f64> {
        self.resume_as(counts, 1, run)
    }

    /// Losses of a saved run that a copy resumes with a number of replicas.
    fn resume_as(&self, [count, batches]: [usize; 2], replicas: usize, run: &str) -> Vec<f64> {
        let copy = self.path(&format!("{run} of {count} {replicas}"));
        crate::support::copy(self.path(run).as_ref(), copy.as_ref());
        let settings =
            [format!("training.grad_accumulation={}", batches / count), format!("parallelism.replicate={replicas}")];
        let arguments = [copy, "--from-step".into(), "2".into()];
        let settings = settings.each_ref().map(String::as_str);
        losses(&float8(count, "resume", &[&arguments[..], &set(&settings)].concat()))
    }

    /// Settings that save a run of four steps.
    fn saved(&self, run: &str) -> [String; 2] {
        ["checkpoint.save_steps=2".into(), format!("checkpoint.output_dir={}", self.path(run))]
    }
}

const FOUR: [&str; 2] = ["training.steps=4", "training.grad_clip_norm=inf"];

/// Two ranks print the same as one rank with twice the micro-batches; without clipping, every digit
/// is equal. Recomputation gathers weights again. The output layer's gradients of chunks are added on
/// each rank, and then over ranks.
#[test]
fn two_ranks_are_one() {
    let runs = Runs::new();
    for precision in [&["float8.recipe=delayed"][..], &["training.precision=f32"]] {
        let settings = [&FOUR, precision].concat();
        let one = runs.train([1, 2], &settings);
        assert_eq!(one.len(), 5);
        let full = "training.activation_checkpointing=full";
        for more in [&[][..], &[full], &[full, "optimizer.in_backward=true"]] {
            assert_eq!(one, runs.train([2, 2], &[&settings[..], more].concat()), "{precision:?} {more:?}");
        }
        let chunks = [&settings[..], &["training.loss_chunk=40"]].concat();
        assert_eq!(runs.train([1, 2], &chunks), runs.train([2, 2], &chunks), "{precision:?}");
    }
}

/// Each rank rounds its rows like a single process rounds the whole, saves them in bf16, and
/// resumes from them; with and without master weights. Adapters are replicated, so one rank resumes
/// from their checkpoint too.
#[test]
fn two_ranks_save_and_resume_as_one() {
    let runs = Runs::new();
    let bf16 = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];
    // Size of the optimizer's state per byte of parameters.
    for (name, settings, bytes) in [
        ("bf16", &bf16[..], Some(2)),
        ("masters", &[bf16[0], bf16[1], "optimizer.master_weights=true"], Some(4)),
        ("adapters", &["lora.rank=4", "optimizer.lr=1e-2"], None),
    ] {
        let settings = [&FOUR[..], settings].concat();
        let [every, folder] = runs.saved(name);
        let one = runs.train([1, 2], &settings);
        let two = runs.train([2, 2], &[&settings[..], &[&every, &folder]].concat());
        assert_eq!((one.len(), &one), (5, &two), "{name}");
        if let Some(bytes) = bytes {
            let [model, optimizer] = ["model", "optimizer"]
                .map(|kind| runs.bytes(&format!("{name}/step-000000004/{kind}-rank-00001-of-00002")));
            assert!(optimizer.abs_diff(bytes * model) < 100_000, "{model} {optimizer}");
        } else {
            assert_eq!(runs.resume([1, 2], name), two[2..]);
        }
        assert_eq!(runs.resume([2, 2], name), two[2..], "{name}");
    }
}

/// A checkpoint of two replicas of two shards is resumed by any other mesh. Each rank of the first
/// replica has written its rows. Replicated parameters, such as norms, are in the first rank's file.
#[test]
fn a_run_goes_on_with_another_mesh() {
    let runs = Runs::new();
    let [every, folder] = runs.saved("run");
    let mesh = "parallelism.replicate=2";
    let all = runs.train([4, 4], &["training.steps=4", "float8.recipe=delayed", mesh, &every, &folder]);
    let is_there = |name: &str| Path::new(&runs.path("run/step-000000004")).join(name).exists();
    for kind in ["model", "optimizer"] {
        let file = |rank: usize| format!("{kind}-rank-0000{rank}-of-00004.safetensors");
        assert_eq!([0, 1, 2, 3].map(|rank| is_there(&file(rank))), [true, true, false, false]);
    }
    let bytes = |kind: &str, rank: usize| runs.bytes(&format!("run/step-000000004/{kind}-rank-0000{rank}-of-00004"));
    let model = bytes("model", 1);
    assert!(bytes("optimizer", 1) > 2 * model - 100_000 && model < bytes("model", 0));
    assert!(is_there("index.json") && !is_there("model.safetensors"));
    for [count, replicas] in [[4, 2], [4, 1], [4, 4], [2, 2], [1, 1]] {
        let resumed = runs.resume_as([count, 4], replicas, "run");
        assert_eq!(resumed.len(), 3);
        for (resumed, all) in resumed.iter().zip(&all[2..]) {
            let limit = if [count, replicas] == [4, 2] { 0.0 } else { 1e-3 * all };
            assert!((resumed - all).abs() <= limit, "{count} {replicas}: {resumed} and {all}");
        }
    }
}

/// Every command reads checkpoints of several ranks and detects damage.
#[test]
fn what_ranks_have_saved_is_read() {
    let runs = Runs::new();
    let [_, folder] = runs.saved("two");
    let two = runs.train([2, 2], &["training.steps=2", &folder]);
    assert_eq!(losses(&float8(1, "eval", &[runs.path("two")])), two[2..]);
    let exported = float8(1, "export", &[runs.path("two"), "--output".into(), runs.path("hf")]);
    assert!(stdout(&exported).contains("exported: ") && Path::new(&runs.path("hf/model.safetensors")).exists());
    let file = runs.path("two/step-000000002/optimizer-rank-00001-of-00002.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let damaged = float8(1, "eval", &[runs.path("two")]);
    assert!(stderr(&damaged).contains("optimizer-rank-00001-of-00002.safetensors is damaged"), "{}", stderr(&damaged));
}

/// The program itself starts `mpirun`. The memory of each rank is estimated before allocation, for
/// any number of ranks and without starting them.
#[test]
fn nproc_is_mpirun_and_memory_of_ranks_is_told() {
    let data = text();
    let arguments = small(&data.1, &["training.steps=1"]);
    let mut program = command(&["train", "--nproc-per-node", "2"]);
    let as_root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
    let output = program.args(&arguments).envs(as_root.map(|name| (name, "1"))).env("RAYON_NUM_THREADS", "1").output();
    let (output, two) = (output.unwrap(), float8(2, "train", &arguments));
    assert!(stdout(&output).contains("Sharded over 2 ranks: "));
    assert_eq!(losses(&output), losses(&two));
    let settings = arguments.iter().position(|argument| argument == "--set").unwrap();
    let table = command(&["memory", "--ranks", "2", "--device", "cpu"]).args(&arguments[settings..]).output().unwrap();
    assert!(stdout(&table).starts_with("memory of a training step on each of 2 ranks"), "{}", stdout(&table));
    let peak = stdout(&table).split_once("peak: ").expect("a peak").1.split_once(" of ").expect("a size").0;
    let line = stdout(&two).lines().find(|line| line.starts_with("memory: a step takes about "));
    let line = line.expect("a line about memory");
    assert!(line.contains(peak) && line.contains("each of 2 ranks"), "{line}, not {peak}");
}

/// An error of one rank is reported by the others too, before the first step. Only one process
/// evaluates: two would repeat the work, or write to the same folder.
#[test]
fn an_error_of_one_rank_is_one_of_each() {
    let data = text();
    let train = small(&data.1, &["training.steps=1", "checkpoint.output_dir=/dev/null/run"]);
    for (subcommand, arguments, says) in [
        ("train", train, "the folder of checkpoints failed on rank 0: "),
        ("resume", vec![data.1.clone() + "-none"], "the command line failed on rank 0: "),
        ("eval", vec!["run".into()], "2 processes were started, but only `train` and `resume`"),
        ("generate", vec!["run".into()], "2 processes were started, but only `train` and `resume`"),
    ] {
        let failed = float8(2, subcommand, &arguments);
        assert!(stderr(&failed).contains(says) && !stderr(&failed).contains("panicked"), "{}", stderr(&failed));
    }
}

/// The same path refers to different files on two ranks.
#[test]
fn other_data_on_a_rank_is_refused() {
    let (folder, mut mpirun) = (tempfile::tempdir().unwrap(), mpirun());
    for (rank, word) in ["one ", "two "].into_iter().enumerate() {
        let own = folder.path().join(word.trim());
        fs::create_dir(&own).unwrap();
        fs::write(own.join("text.txt"), word.repeat(5_000)).unwrap();
        let mut program = command(&["train"]);
        program.args(small("text.txt", &["training.steps=1"]));
        mpirun.args((rank > 0).then_some(":")).args(["-n", "1", "-wdir"]).arg(own);
        add(&mut mpirun, &program);
    }
    let output = mpirun.output().expect("mpirun is installed (apt: openmpi-bin)");
    assert!(stderr(&output).contains("the data is not the same on all ranks"), "{}", stderr(&output));
}
