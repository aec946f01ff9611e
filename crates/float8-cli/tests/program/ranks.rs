//! Runs over several ranks, started by `mpirun`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::parts::{MODEL, mesh};
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
pub(crate) fn float8(count: usize, subcommand: &str, arguments: &[String]) -> Output {
    let (mut mpirun, mut program) = (mpirun(), command(&[subcommand]));
    program.args(arguments);
    mpirun.args(["-n", &count.to_string()]);
    add(&mut mpirun, &program);
    mpirun.output().expect("mpirun is installed (apt: openmpi-bin)")
}

/// Losses of the steps, then the validation loss.
pub(crate) fn losses(output: &Output) -> Vec<f64> {
    let after = |line: &str, word: &str| line.split_once(word)?.1.split_whitespace().next()?.parse().ok();
    let of = |begin: &str, word: &str| -> Vec<f64> {
        stdout(output).lines().filter(|line| line.starts_with(begin)).filter_map(|line| after(line, word)).collect()
    };
    [of("step:", "  loss:"), of("validation", "loss:")].concat()
}

/// Text, and the folders of runs.
pub(crate) struct Runs((TempDir, String));

impl Runs {
    pub(crate) fn new() -> Self {
        Self(text())
    }

    /// Text file.
    pub(crate) fn text(&self) -> &str {
        &self.0.1
    }

    pub(crate) fn path(&self, name: &str) -> String {
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

    /// Losses of a run from the weights of a Hugging Face folder.
    pub(crate) fn fine_tune(&self, hf: &str, [count, batches]: [usize; 2], settings: &[&str]) -> Vec<f64> {
        let accumulation = format!("training.grad_accumulation={}", batches / count);
        let fixed = ["--model".into(), self.path(hf), "--data".into(), self.0.1.clone()];
        let small =
            ["training.seq_len=16", "training.log_every=1", "generate.max_new_tokens=0", "data.tokenizer=bytes"];
        losses(&float8(
            count,
            "train",
            &[&fixed[..], &set(&[&small[..], settings, &[&accumulation]].concat())].concat(),
        ))
    }

    /// Losses of a saved run of four steps that a copy resumes after the second.
    fn resume(&self, counts: [usize; 2], run: &str) -> Vec<f64> {
        self.resume_as(counts, 1, run)
    }

    /// Losses of a saved run that a copy resumes with a number of replicas.
    fn resume_as(&self, [count, batches]: [usize; 2], replicas: usize, run: &str) -> Vec<f64> {
        let settings =
            [format!("training.grad_accumulation={}", batches / count), format!("parallelism.replicate={replicas}")];
        self.resume_with(count, run, &settings.each_ref().map(String::as_str))
    }

    /// Losses of a saved run that a copy on `count` ranks resumes with other settings.
    pub(crate) fn resume_with(&self, count: usize, run: &str, settings: &[&str]) -> Vec<f64> {
        let copy = self.path(&format!("{run} on {count} with {}", settings.join(" ")));
        crate::support::copy(self.path(run).as_ref(), copy.as_ref());
        let arguments = [copy, "--from-step".into(), "2".into()];
        losses(&float8(count, "resume", &[&arguments[..], &set(settings)].concat()))
    }

    /// Settings that save a run of four steps.
    pub(crate) fn saved(&self, run: &str) -> [String; 2] {
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
    // The checkpoint of a single process, which has its parameters in one file.
    let [every, folder] = runs.saved("one");
    let one = runs.train([1, 2], &[&FOUR[..], &["float8.recipe=delayed", &every, &folder]].concat());
    assert!(Path::new(&runs.path("one/step-000000002/model.safetensors")).exists());
    assert_eq!(runs.resume([2, 2], "one"), one[2..]);
}

/// Experts that ranks divide train as whole ones, and any mesh resumes their checkpoint.
#[test]
fn divided_experts_are_saved_and_resumed() {
    let runs = Runs::new();
    let [every, folder] = runs.saved("experts");
    let settings =
        ["training.steps=4", "training.precision=f32", "model.preset=llama3-debug-moe", "parallelism.experts=true"];
    let one = runs.train([1, 4], &settings);
    let others = ["training.activation_checkpointing=full", "parallelism.replicate=2", &every, &folder];
    let all = runs.train([4, 4], &[&settings[..], &others].concat());
    let near = |found: &[f64], expected: &[f64]| {
        let is_near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= 1e-3 * expected);
        assert!(is_near && found.len() == expected.len(), "{found:?} and {expected:?}");
    };
    near(&all, &one);
    // Each rank of the first replica has written half of the experts.
    let index = fs::read_to_string(runs.path("experts/step-000000004/index.json")).unwrap();
    let index: String = index.split_whitespace().collect();
    let (_, parts) =
        index.split_once("\"layers.0.moe.experts.up_proj.weight\":{\"shape\":[4,32,64],\"parts\":").unwrap();
    assert!(parts.starts_with("[{\"rows\":[0,2],") && parts.contains("{\"rows\":[2,4],"), "{parts}");
    for [count, replicas] in [[4, 2], [4, 1], [2, 1], [4, 4], [1, 1]] {
        near(&runs.resume_as([count, 4], replicas, "experts"), &all[2..]);
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
    // Ranks load their rows of it.
    let [one, two] = [1, 2].map(|ranks| runs.fine_tune("hf", [ranks, 2], &FOUR));
    assert_eq!((one.len(), one), (5, two));
    // The input scales of an FP8 folder serve all micro-batches of the first step.
    let ([_, folder], recipe) = (runs.saved("delayed"), "float8.recipe=delayed");
    runs.train([1, 1], &["training.steps=2", recipe, &folder]);
    let arguments = [runs.path("delayed"), "--format".into(), "fp8".into(), "--output".into(), runs.path("fp8")];
    stdout(&float8(1, "export", &arguments));
    let [one, two] = [1, 2].map(|ranks| runs.fine_tune("fp8", [ranks, 4], &[&FOUR[..], &[recipe]].concat()));
    assert_eq!(one, two);
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

/// Ranks draw, read and resume their rows of a model, one parameter at a time. Four more layers add to
/// the peak of a rank's process a quarter of their parameters and moments, 0.75 of their bytes, and
/// one parameter. The whole layers with a quarter of their moments would be 1.5.
#[test]
fn no_rank_holds_the_whole_model() {
    let runs = Runs::new();
    let settings = |run: &str, layers: usize| {
        let output = format!("checkpoint.output_dir={}", runs.path(run));
        let model = format!(
            "model.overrides={{ num_hidden_layers = {layers}, hidden_size = 512, intermediate_size = 1408, \
             num_attention_heads = 8, num_key_value_heads = 8, head_dim = 64 }}"
        );
        let fixed = [
            "training.steps=1",
            "training.seq_len=16",
            "training.batch_size=1",
            "training.log_every=1",
            "training.precision=f32",
            "training.grad_clip_norm=inf",
            "training.activation_checkpointing=full",
            "optimizer.in_backward=true",
            "parallelism.reshard=after_forward",
            "checkpoint.background=false",
            "generate.max_new_tokens=0",
            "data.validation_split=0",
        ];
        let data = ["--device", "cpu", "--data", &runs.0.1].map(String::from);
        [&data[..], &set(&[&fixed[..], &[&output, &model]].concat())].concat()
    };
    let memory = |run: &str, subcommand: &str, arguments: &[String]| -> f64 {
        stdout(&float8(4, subcommand, arguments));
        let metrics = fs::read_to_string(runs.path(run) + "/metrics.jsonl").unwrap();
        let of = |line: &str| line.split_once("\"memory_bytes\":")?.1.split([',', '}']).next()?.trim().parse().ok();
        metrics.lines().filter_map(of).next_back().expect("a step has its memory")
    };
    let empty = memory("empty", "train", &settings("empty", 1));
    let whole = 4.0 * 4.0 * (4.0 * 512.0 * 512.0 + 3.0 * 512.0 * 1408.0);
    let drawn = memory("run", "train", &settings("run", 5));
    let resumed = memory("run", "resume", &[runs.path("run"), "--steps".into(), "2".into()]);
    stdout(&float8(1, "export", &[runs.path("run"), "--output".into(), runs.path("hf")]));
    let mut hf = [&["--model".into(), runs.path("hf")], &settings("tuned", 5)[..]].concat();
    hf.truncate(hf.len() - 2);
    let read = memory("tuned", "train", &[&hf[..], &set(&["data.tokenizer=bytes"])].concat());
    for (name, bytes) in [("drawn", drawn), ("resumed", resumed), ("read", read)] {
        let part = (bytes - empty) / whole;
        println!("{name}: {part:.2} of the bytes of four layers");
        assert!((0.5..1.3).contains(&part), "{name}: {bytes} and {empty} of {whole}");
    }
}

/// Variable with the number of moments at which a rank is killed.
const KILLS: &str = "FLOAT8_KILLS";

/// A run whose ranks are killed.
struct Killed {
    name: &'static str,
    settings: &'static [&'static str],
    /// Replicas, shards and parts of each job, in turns. The first resumes the run at the end.
    meshes: &'static [[usize; 3]],
}

const KILLED: [Killed; 2] = [
    Killed { name: "dense", settings: &MODEL, meshes: &[[2, 1, 2], [1, 1, 4], [2, 2, 1], [1, 2, 2], [4, 1, 1]] },
    Killed {
        name: "experts",
        settings: &["model.preset=llama3-debug-moe", "parallelism.experts=true"],
        meshes: &[[1, 2, 1], [1, 4, 1], [2, 2, 1]],
    },
];

/// A rank is killed at several moments of two runs. Each time the job ends within five seconds, and
/// another mesh continues the run from its last checkpoint.
#[test]
fn a_killed_rank_ends_the_job_and_another_mesh_resumes() {
    let runs = Runs::new();
    let kills: usize = std::env::var(KILLS).map_or(5, |kills| kills.parse().expect("a number"));
    let arguments = |run: &Killed, parts: [usize; 3], steps: usize| {
        let (saved, path) = (last_step(&runs.path(run.name)) > 0, runs.path(run.name));
        let [replicate, shard, tensor] = mesh(parts);
        let accumulation = format!("training.grad_accumulation={}", 4 / (parts[0] * parts[1]));
        let of_mesh = [&*replicate, &*shard, &*tensor, &*accumulation];
        if saved {
            return ("resume", [&[path, "--steps".into(), steps.to_string()][..], &set(&of_mesh)].concat());
        }
        let (steps, output) = (format!("training.steps={steps}"), format!("checkpoint.output_dir={path}"));
        let fixed = [&*steps, "checkpoint.save_steps=1", "training.eval_batches=1", &*output];
        ("train", small(&runs.0.1, &[&fixed[..], run.settings, &of_mesh].concat()))
    };
    let (mut slowest, mut last) = (0.0_f64, [0; 2]);
    for kill in 0..kills {
        let run = &KILLED[kill % 2];
        let (parts, folder) = (run.meshes[(kill / 2 + 1) % run.meshes.len()], runs.path(run.name));
        let count = parts.into_iter().product();
        let saved = last_step(&folder);
        assert!(saved >= last[kill % 2], "{saved} after {last:?}");
        last[kill % 2] = saved;
        let (subcommand, arguments) = arguments(run, parts, 400);
        let (mut job, mut program) = (mpirun(), command(&[subcommand]));
        program.args(arguments);
        job.args(["-n", &usize::to_string(&count)]);
        add(&mut job, &program);
        let job = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun is installed");
        // Moments from the start of MPI to the steps and their checkpoints. Every second job of a run has
        // saved one.
        let moment = Duration::from_millis(300 + 4200 * kill as u64 / kills as u64);
        let begin = Instant::now();
        let mut ranks = children(job.id());
        let has_saved = || kill % 4 > 1 || last_step(&folder) > saved;
        while begin.elapsed() < moment || ranks.len() < count || !has_saved() {
            std::thread::sleep(Duration::from_millis(20));
            ranks = children(job.id());
            assert!(begin.elapsed() < Duration::from_secs(60), "mpirun has started {ranks:?}");
        }
        let killed = Instant::now();
        stdout(&Command::new("kill").args(["-9", &ranks[kill % ranks.len()].to_string()]).output().unwrap());
        let output = job.wait_with_output().unwrap();
        let seconds = killed.elapsed().as_secs_f64();
        slowest = slowest.max(seconds);
        assert!(seconds < 5.0 && !output.status.success(), "{kill}: {seconds} s after the kill: {}", output.status);
    }
    let done = KILLED.each_ref().map(|run| last_step(&runs.path(run.name)));
    println!("{kills} kills: a job ended within {slowest:.2} s, after {done:?} steps");
    assert!(done.iter().sum::<usize>() >= kills.div_ceil(2));
    for (run, done) in KILLED.iter().zip(done).filter(|(_, done)| *done > 0) {
        let parts = run.meshes[0];
        let (subcommand, arguments) = arguments(run, parts, done + 2);
        assert_eq!(losses(&float8(parts.into_iter().product(), subcommand, &arguments)).len(), 3);
    }
}

/// Step of the newest checkpoint; 0 without one.
fn last_step(run: &str) -> usize {
    let Ok(entries) = fs::read_dir(run) else { return 0 };
    let step =
        |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
    entries.filter_map(step).max().unwrap_or(0)
}

/// Processes that a process has started.
fn children(parent: u32) -> Vec<u32> {
    let is_child = |process: &u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["PPid:", &parent.to_string()]))
    };
    let processes = fs::read_dir("/proc")
        .expect("a folder of processes")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(is_child).collect()
}

/// Ctrl-C in the program that starts the ranks, a signal that mpirun forwards, and one to one rank
/// alone: all ranks finish their step, save together and end.
#[test]
fn a_signal_saves_on_all_ranks() {
    for (signal, code) in [("-INT", 130), ("-USR1", 138), ("-TERM", 143)] {
        let runs = Runs::new();
        let output = format!("checkpoint.output_dir={}", runs.path("run"));
        let mut program = command(&["train", "--nproc-per-node", "2"]);
        program.args(small(&runs.0.1, &["training.steps=100000", &output])).env("RAYON_NUM_THREADS", "1");
        program.envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")));
        let job = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (begin, metrics) = (Instant::now(), runs.path("run/metrics.jsonl"));
        while !fs::read_to_string(&metrics).is_ok_and(|lines| lines.contains("loss")) {
            assert!(begin.elapsed() < Duration::from_secs(60), "no step was taken");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mpirun = children(job.id())[0];
        let to = match signal {
            "-INT" => job.id(),
            "-USR1" => mpirun,
            _ => children(mpirun)[1],
        };
        stdout(&Command::new("kill").args([signal, &to.to_string()]).output().unwrap());
        let output = job.wait_with_output().unwrap();
        let text = [&output.stdout[..], &output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let saved = last_step(&runs.path("run"));
        assert!(saved > 0 && text.contains(&format!(" after step {saved}")), "{signal}: {text}");
        assert_eq!(output.status.code(), Some(code), "{text}");
        let steps = (saved + 1).to_string();
        assert_eq!(losses(&float8(1, "resume", &[runs.path("run"), "--steps".into(), steps])).len(), 2);
    }
}
