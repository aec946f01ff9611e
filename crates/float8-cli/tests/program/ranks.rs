//! Runs over several ranks, started by `mpirun`.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{command, set, small, stderr, stdout, text};

/// Runs the program with these arguments on `count` ranks.
fn ranks(count: usize, program: &Command) -> Output {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", &count.to_string()]);
    mpirun.arg(program.get_program()).args(program.get_args());
    mpirun.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    mpirun.env("RAYON_NUM_THREADS", "1").output().expect("mpirun is installed (apt: openmpi-bin)")
}

fn float8(count: usize, subcommand: &str, arguments: &[String]) -> Output {
    let mut program = command(&[subcommand]);
    program.args(arguments);
    ranks(count, &program)
}

/// Losses of the steps, then the validation loss.
fn losses(log: &str) -> Vec<f64> {
    let after = |line: &str, word: &str| line.split_once(word)?.1.split_whitespace().next()?.parse().ok();
    let steps = log.lines().filter(|line| line.starts_with("step:")).filter_map(|line| after(line, "  loss:"));
    steps
        .chain(log.lines().filter(|line| line.starts_with("validation")).filter_map(|line| after(line, "loss:")))
        .collect()
}

fn accumulation(count: usize) -> Vec<String> {
    set(&[&format!("training.grad_accumulation={count}")])
}

/// Two ranks print the same as one rank with twice the micro-batches; without clipping, every digit
/// is equal.
#[test]
fn two_ranks_are_one() {
    let data = text();
    for precision in ["training.precision=fp8", "training.precision=f32"] {
        let settings = ["training.steps=4", "training.grad_clip_norm=inf", "float8.recipe=delayed", precision];
        let settings =
            if precision.ends_with("f32") { &[settings[0], settings[1], settings[3]][..] } else { &settings };
        let arguments = small(&data.1, settings);
        let one = float8(1, "train", &[&arguments[..], &accumulation(2)].concat());
        let two = float8(2, "train", &arguments);
        assert!(stdout(&two).contains("Sharded over 2 ranks: "), "{}", stdout(&two));
        assert_eq!(losses(stdout(&one)).len(), 5);
        assert_eq!(losses(stdout(&one)), losses(stdout(&two)));
        // Recomputation gathers weights again.
        let recomputed = set(&["training.activation_checkpointing=full"]);
        let recomputed = float8(2, "train", &[&arguments[..], &recomputed].concat());
        assert_eq!(losses(stdout(&one)), losses(stdout(&recomputed)), "{}", stderr(&recomputed));
        let in_backward = set(&["training.activation_checkpointing=full", "optimizer.in_backward=true"]);
        let in_backward = float8(2, "train", &[&arguments[..], &in_backward].concat());
        assert_eq!(losses(stdout(&one)), losses(stdout(&in_backward)), "{}", stderr(&in_backward));
        // The output layer's gradients of chunks are added on each rank, and then over ranks.
        let chunks = set(&["training.loss_chunk=40"]);
        let one = float8(1, "train", &[&arguments[..], &accumulation(2), &chunks].concat());
        let two = float8(2, "train", &[&arguments[..], &chunks].concat());
        assert_eq!(losses(stdout(&one)), losses(stdout(&two)), "{}", stderr(&two));
    }
}

/// Each rank rounds its rows like a single process rounds the whole, saves them in bf16, and
/// resumes from them; with and without master weights.
#[test]
fn two_ranks_are_one_in_bf16() {
    for (masters, bytes) in [("optimizer.master_weights=false", 2), ("optimizer.master_weights=true", 4)] {
        two_ranks_are_one_with(masters, bytes);
    }
}

/// `bytes`: size of the optimizer's state per byte of parameters.
fn two_ranks_are_one_with(masters: &str, bytes: u64) {
    let data = text();
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("run");
    let settings = [
        "training.steps=4",
        "checkpoint.save_steps=2",
        "training.grad_clip_norm=inf",
        "training.param_dtype=bf16",
        "optimizer.state_dtype=bf16",
        masters,
    ];
    let arguments = small(&data.1, &settings);
    let one = losses(stdout(&float8(1, "train", &[&arguments[..], &accumulation(2)].concat())));
    let folder = ["--output-dir".into(), saved.display().to_string()];
    let two = losses(stdout(&float8(2, "train", &[&arguments[..], &folder].concat())));
    assert_eq!((one.len(), &one), (5, &two));
    let file = |kind: &str| saved.join(format!("step-000000004/{kind}-rank-00001-of-00002.safetensors"));
    let [model, optimizer] = ["model", "optimizer"].map(|kind| std::fs::metadata(file(kind)).unwrap().len());
    assert!(optimizer.abs_diff(bytes * model) < 100_000, "{model} {optimizer}");
    let resumed =
        losses(stdout(&float8(2, "resume", &[saved.display().to_string(), "--from-step".into(), "2".into()])));
    assert_eq!(resumed, two[2..]);
}

/// A checkpoint of four ranks is resumed by two and by one.
#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let data = text();
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("run");
    let recipe = ["training.steps=4", "checkpoint.save_steps=2", "float8.recipe=delayed"];
    let arguments = [small(&data.1, &recipe), vec!["--output-dir".into(), saved.display().to_string()]].concat();
    let all = losses(stdout(&float8(4, "train", &arguments)));
    // Each rank has written its rows. Replicated parameters, such as norms, are in the first rank's
    // file.
    let checkpoint = saved.join("step-000000004");
    let bytes = |rank| {
        let file = |kind| checkpoint.join(format!("{kind}-rank-0000{rank}-of-00004.safetensors"));
        ["model", "optimizer"].map(|kind| std::fs::metadata(file(kind)).unwrap().len())
    };
    let [model, optimizer] = bytes(1);
    assert!(optimizer > 2 * model - 100_000 && model < bytes(0)[0] && !checkpoint.join("model.safetensors").exists());
    assert!(checkpoint.join("index.json").exists());
    for count in [4, 2, 1] {
        let copy = folder.path().join(format!("of-{count}"));
        copy_folder(&saved, &copy);
        let arguments =
            [vec![copy.display().to_string(), "--from-step".into(), "2".into()], accumulation(4 / count)].concat();
        let resumed = losses(stdout(&float8(count, "resume", &arguments)));
        assert_eq!(resumed.len(), 3);
        for (resumed, all) in resumed.iter().zip(&all[2..]) {
            assert!((resumed - all).abs() <= if count == 4 { 0.0 } else { 1e-3 * all }, "{count}: {resumed} and {all}");
        }
    }
}

/// Adapters are replicated. Two ranks print the same as one, and both two and one can resume from
/// their checkpoint.
#[test]
fn adapters_over_ranks_are_those_of_one() {
    let data = text();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let settings = [
        "training.steps=4",
        "checkpoint.save_steps=2",
        "training.grad_clip_norm=inf",
        "lora.rank=4",
        "optimizer.lr=1e-2",
    ];
    let train = |count: usize, name: &str| {
        let saved = vec!["--output-dir".into(), path(name).display().to_string()];
        losses(stdout(&float8(count, "train", &[small(&data.1, &settings), accumulation(2 / count), saved].concat())))
    };
    let (one, two) = (train(1, "one"), train(2, "two"));
    assert_eq!((one.len(), &one), (5, &two));
    assert!(one[4] < one[0], "they learn: {one:?}");
    for count in [2, 1] {
        let copy = path(&format!("of-{count}"));
        copy_folder(&path("two"), &copy);
        let arguments =
            [vec![copy.display().to_string(), "--from-step".into(), "2".into()], accumulation(2 / count)].concat();
        assert_eq!(losses(stdout(&float8(count, "resume", &arguments))), two[2..], "{count}");
    }
}

/// Every command reads checkpoints of several ranks and detects damage.
#[test]
fn what_ranks_have_saved_is_read() {
    let data = text();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let steps = |folder: &str| [small(&data.1, &["training.steps=2"]), vec!["--output-dir".into(), path(folder)]];
    let [one, two] = [
        float8(1, "train", &[&steps("one").concat()[..], &accumulation(2)].concat()),
        float8(2, "train", &steps("two").concat()),
    ];
    assert_eq!(losses(stdout(&one)).len(), 3);
    assert_eq!(losses(stdout(&two)).len(), 3);
    let evaluated = losses(stdout(&float8(1, "eval", &[path("two")])));
    assert_eq!(evaluated, losses(stdout(&two))[2..]);
    let exported = float8(1, "export", &[path("two"), "--output".into(), path("hf")]);
    assert!(stdout(&exported).contains("exported: ") && folder.path().join("hf/model.safetensors").exists());
    let file = folder.path().join("two/step-000000002/optimizer-rank-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let damaged = float8(1, "eval", &[path("two")]);
    assert!(stderr(&damaged).contains("optimizer-rank-00001-of-00002.safetensors is damaged"), "{}", stderr(&damaged));
}

/// The program itself starts `mpirun`.
#[test]
fn nproc_is_mpirun() {
    let data = text();
    let arguments = small(&data.1, &["training.steps=1"]);
    let mut program = command(&["train", "--nproc-per-node", "2"]);
    let as_root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
    let output = program.args(&arguments).envs(as_root.map(|name| (name, "1"))).env("RAYON_NUM_THREADS", "1").output();
    let (output, two) = (output.unwrap(), float8(2, "train", &arguments));
    assert!(stdout(&output).contains("Sharded over 2 ranks: "));
    assert_eq!(losses(stdout(&output)), losses(stdout(&two)));
}

/// The memory of each rank is estimated before allocation, for any number of ranks and without
/// starting them.
#[test]
fn memory_of_ranks_is_told() {
    let data = text();
    let arguments = small(&data.1, &["training.steps=1"]);
    let settings = arguments.iter().position(|argument| argument == "--set").unwrap();
    let table = command(&["memory", "--ranks", "2", "--device", "cpu"]).args(&arguments[settings..]).output().unwrap();
    let run = float8(2, "train", &arguments);
    assert!(stdout(&table).starts_with("memory of a training step on each of 2 ranks"), "{}", stdout(&table));
    let peak = stdout(&table).split_once("peak: ").expect("a peak").1.split_once(" of ").expect("a size").0;
    let line = stdout(&run).lines().find(|line| line.starts_with("memory: a step takes about "));
    let line = line.expect("a line about memory");
    assert!(line.contains(peak) && line.contains("each of 2 ranks"), "{line}, not {peak}");
}

/// The output layer reads the embedding's table. Gradients of both uses are added in another order
/// than on one rank.
#[test]
fn a_tied_output_is_sharded() {
    let data = text();
    let arguments = small(
        &data.1,
        &["training.steps=4", "training.grad_clip_norm=inf", "model.overrides.tie_word_embeddings=true"],
    );
    let one = losses(stdout(&float8(1, "train", &[&arguments[..], &accumulation(2)].concat())));
    let two = losses(stdout(&float8(2, "train", &arguments)));
    assert_eq!((one.len(), one[0]), (5, two[0]));
    for (one, two) in one.iter().zip(&two) {
        assert!((one - two).abs() <= 1e-3 * one, "{one} and {two}");
    }
}

/// An error of one rank is reported by the others too, before the first step.
#[test]
fn an_error_of_one_rank_is_one_of_each() {
    let data = text();
    let nowhere = "checkpoint.output_dir=/dev/null/run";
    let failed = float8(2, "train", &small(&data.1, &["training.steps=1", nowhere]));
    let said = stderr(&failed);
    assert!(said.contains("the folder of checkpoints failed on rank 0: ") && said.contains("/dev/null"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

/// The same path refers to different files on two ranks.
#[test]
fn other_data_on_a_rank_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe"]);
    for (rank, word) in ["one ", "two "].into_iter().enumerate() {
        let own = folder.path().join(word.trim());
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("text.txt"), word.repeat(5_000)).unwrap();
        let mut program = command(&["train"]);
        program.args(small("text.txt", &["training.steps=1"]));
        let separator = (rank > 0).then_some(":");
        mpirun.args(separator).args(["-n", "1", "-wdir"]).arg(own).arg(program.get_program()).args(program.get_args());
        mpirun.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    }
    let output = mpirun.env("RAYON_NUM_THREADS", "1").output().expect("mpirun is installed (apt: openmpi-bin)");
    assert!(stderr(&output).contains("the data is not the same on all ranks"), "{}", stderr(&output));
}

#[test]
fn a_resume_of_nothing_is_an_error_of_each_rank() {
    let data = text();
    let none = float8(2, "resume", &[data.1.clone() + "-none"]);
    assert!(stderr(&none).contains("the command line failed on rank 0: "), "{}", stderr(&none));
}

/// Only one process evaluates: two would repeat the work, or write to the same folder.
#[test]
fn only_training_takes_several_ranks() {
    for subcommand in ["eval", "generate"] {
        let two = float8(2, subcommand, &["run".into()]);
        assert!(stderr(&two).contains("2 processes were started, but only `train` and `resume`"), "{}", stderr(&two));
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() { copy_folder(&path, &to) } else { std::fs::copy(&path, &to).map(drop).unwrap() }
    }
}
