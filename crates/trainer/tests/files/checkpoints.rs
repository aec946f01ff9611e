//! Folders of checkpoints: kept and refused files, and errors of damage.

use std::fs;
use std::path::Path;

use float8_shard::Communicator;
use trainer::checkpoint::CheckpointKind::{Diverged, ValidationLoss};
use trainer::checkpoint::{
    CheckpointFolder, CheckpointKind, Checkpoints, SavedRun, Which, best, changes, find_checkpoint, noted_latest,
    saved_steps,
};
use trainer::config::CheckpointSection;
use trainer::digest_of_file;

const FILES: [(&str, &str); 3] =
    [("state.json", "{\"format\":1}"), ("config.toml", "a = 1"), ("model.safetensors", "weights")];

fn save(folder: &CheckpointFolder, step: u64, kind: CheckpointKind, keep: usize) {
    let write = |partial: &Path| Ok(FILES.iter().try_for_each(|(name, text)| fs::write(partial.join(name), text))?);
    folder.save(step, kind, keep, write).unwrap();
}

fn text<T: std::fmt::Debug>(result: anyhow::Result<T>) -> String {
    format!("{:#}", result.unwrap_err())
}

fn newest(folder: &Path) -> String {
    find_checkpoint(folder, Which::Latest).unwrap().file_name().unwrap().to_str().unwrap().into()
}

#[test]
fn a_run_keeps_the_newest_and_the_best() {
    let dir = tempfile::tempdir().unwrap();
    let folder = CheckpointFolder::open(dir.path()).unwrap();
    for (step, loss, kept) in [(2, 3.0, vec![2]), (4, 1.0, vec![2, 4]), (6, 2.0, vec![4, 6]), (8, 1.0, vec![4, 6, 8])] {
        save(&folder, step, ValidationLoss(Some(loss)), 2);
        assert_eq!(saved_steps(dir.path()).unwrap(), kept);
    }
    assert_eq!(best(dir.path()).unwrap(), Some((4, 1.0)), "of equal losses the first");
    assert_eq!(noted_latest(dir.path()).unwrap(), "step-000000008");
    assert_eq!(fs::read_to_string(dir.path().join("BEST")).unwrap(), "step-000000004\n1.0\n");
    assert!(find_checkpoint(dir.path(), Which::Best).unwrap().ends_with("step-000000004"));
    save(&folder, 9, Diverged, 2);
    assert_eq!((newest(dir.path()), saved_steps(dir.path()).unwrap().len()), ("step-000000008".into(), 3));
}

#[test]
fn a_run_that_went_back_is_not_resumed_from_what_it_gave_up() {
    let dir = tempfile::tempdir().unwrap();
    let folder = CheckpointFolder::open(dir.path()).unwrap();
    for step in [4, 8, 12, 16] {
        save(&folder, step, ValidationLoss(Some(if step == 12 { 0.5 } else { 1.0 })), 9);
    }
    let best = || best(dir.path()).unwrap().unwrap();
    folder.resume_from(16).unwrap();
    assert_eq!((newest(dir.path()), best()), ("step-000000016".into(), (12, 0.5)));

    // A run that crashes before its first new checkpoint resumes from the same step.
    for _ in 0..2 {
        folder.resume_from(8).unwrap();
        assert_eq!((newest(dir.path()), best()), ("step-000000008".into(), (4, 1.0)));
        assert_eq!(
            saved_steps(dir.path()).unwrap(),
            [4, 8, 12, 16],
            "nothing is removed before there is something new"
        );
        assert!(find_checkpoint(dir.path(), Which::Step(16)).is_ok(), "an explicit step still works");
    }
    save(&folder, 14, ValidationLoss(Some(1.0)), 9);
    assert_eq!((newest(dir.path()), saved_steps(dir.path()).unwrap()), ("step-000000014".into(), vec![4, 8, 14]));
}

#[test]
fn nothing_of_another_program_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let theirs = ["film.partial", "work.partial/precious", ".other.partial", "step-99/precious"];
    let in_the_way = ["step-000000099/precious", "diverged-7/precious", "step-000000014/precious"];
    // Leftovers of interrupted runs.
    let left = [".step-000000002.partial/model.safetensors", ".LATEST.17.partial"];
    for name in [&theirs[..], &in_the_way, &left].concat() {
        fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        fs::write(path(name), "precious").unwrap();
    }
    let folder = CheckpointFolder::open(dir.path()).unwrap();
    assert!(saved_steps(dir.path()).unwrap().is_empty());
    for step in [12, 14] {
        save(&folder, step, ValidationLoss(None), 1);
    }
    assert_eq!(saved_steps(dir.path()).unwrap(), [14]);
    assert!(left.iter().all(|name| !path(name).exists()));
    assert!(theirs.iter().chain(&in_the_way[..2]).all(|name| path(name).exists()));
    let aside = path(&format!("not-of-this-run-step-000000014-{}", std::process::id()));
    assert!(aside.join("precious").exists(), "a folder in the way of a checkpoint is moved");
}

#[test]
fn a_new_run_needs_a_folder_without_a_run() {
    let new = |dir: &Path| {
        let section = CheckpointSection { output_dir: Some(dir.into()), ..CheckpointSection::default() };
        let assets = |to: &Path| Ok(fs::write(to.join("tokenizer.json"), "new")?);
        Checkpoints::new(&section, &Communicator::solo(), true, assets)
    };
    for name in ["config.toml", "assets", "metrics.jsonl"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), "precious").unwrap();
        let error = text(new(dir.path()));
        assert!(error.contains(&format!("{name} is of no run, and a run would replace it")), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is written");
    }
    for (kind, expected) in [
        (ValidationLoss(None), "holds a run of 3 steps: `resume` continues it"),
        (Diverged, "holds a run that diverged at step 3 before it had a checkpoint"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        save(&CheckpointFolder::open(dir.path()).unwrap(), 3, kind, 1);
        assert!(text(new(dir.path())).contains(expected));
    }
    // A run that ended before its first checkpoint leaves nothing to the next one.
    let dir = tempfile::tempdir().unwrap();
    drop(new(dir.path()).unwrap());
    fs::write(dir.path().join("assets/other.json"), "of another model").unwrap();
    let running = new(dir.path()).unwrap();
    assert!(!dir.path().join("assets/other.json").exists() && dir.path().join("assets/tokenizer.json").exists());
    let expected = format!("another run is writing to {}: wait for it", dir.path().display());
    assert!(text(CheckpointFolder::open(dir.path())).starts_with(&expected));
    drop(running);
    CheckpointFolder::open(dir.path()).unwrap();
}

#[test]
fn damage_is_reported_with_the_file_and_the_other_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let folder = CheckpointFolder::open(dir.path()).unwrap();
    [10, 12].into_iter().for_each(|step| save(&folder, step, ValidationLoss(None), 2));
    let last = dir.path().join("step-000000012");
    let find = || text(find_checkpoint(dir.path(), Which::Latest));
    for name in ["state.json", "config.toml", "model.safetensors", "checksums.json"] {
        let whole = fs::read(last.join(name)).unwrap();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for bytes in [&flipped[..], &whole[..whole.len() / 2], &[]] {
            fs::write(last.join(name), bytes).unwrap();
            let error = find();
            // A wrong checksum is reported for the file it belongs to.
            assert!(error.contains(name) || name == "checksums.json", "{error}");
            assert!(error.contains("is damaged: "), "{error}");
            assert!(error.ends_with("There are checkpoints of step 10: `--from-step N` takes one of them"), "{error}");
        }
        fs::write(last.join(name), whole).unwrap();
    }
    let damage = |damage: &dyn Fn(&Path), expected: &str| {
        let (path, moved) = (last.join("model.safetensors"), dir.path().join("moved"));
        fs::copy(&path, &moved).unwrap();
        damage(&path);
        let error = find();
        assert!(error.contains(expected), "{error}");
        fs::rename(moved, path).unwrap();
    };
    let lengthen = |path: &Path| fs::File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
    damage(&lengthen, "it has 1099511627776 bytes, 7 were written");
    damage(&|path| fs::remove_file(path).unwrap(), "it is missing");
    fs::write(last.join("more.safetensors"), "").unwrap();
    assert!(find().contains("more.safetensors is damaged: checksums.json does not list it"));
    find_checkpoint(dir.path(), Which::Step(10)).unwrap();
    assert!(text(find_checkpoint(dir.path(), Which::Step(11))).ends_with("`step 11`; there are step 10, 12"));
    assert!(text(find_checkpoint(dir.path(), Which::Best)).contains("has no checkpoint `best`"));
    let error = text(SavedRun::open(dir.path(), Which::Step(10)));
    assert!(error.ends_with("state.json has format 1, this program reads 3"), "{error}");
    assert_eq!(digest_of_file(&last.join("config.toml")).unwrap().len(), 64);
}

/// Links are not followed, and pipes do not block.
#[cfg(unix)]
#[test]
fn a_run_writes_nothing_outside_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let (outside, run) = (dir.path().join("outside"), dir.path().join("run"));
    fs::write(&outside, "theirs").unwrap();
    let write = |name: &str| match name {
        "LOCK" => text(CheckpointFolder::open(&run)),
        "LATEST" => text(CheckpointFolder::open(&run).unwrap().save(1, ValidationLoss(None), 1, |_| Ok(()))),
        _ => text(trainer::metrics::Metrics::append(&run.join(name))),
    };
    for name in ["LOCK", "LATEST", "metrics.jsonl"] {
        fs::create_dir_all(&run).unwrap();
        let path = run.join(name);
        std::os::unix::fs::symlink(&outside, &path).unwrap();
        let linked = write(name);
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        for (error, why) in [(linked, "it is a link"), (write(name), "it is a pipe")] {
            assert!(error.contains(name) && error.contains(why), "{error}");
        }
        assert_eq!(fs::read_to_string(&outside).unwrap(), "theirs");
        fs::remove_dir_all(&run).unwrap();
    }
}

#[test]
fn keys_that_define_a_run_must_not_change() {
    let table = |text: &str| text.parse::<toml::Table>().unwrap();
    let was = "training.seq_len = 16\ntraining.param_dtype = 'f32'\ntraining.steps = 12\noptimizer.lr = 5e-3";
    for (line, changed, says) in [
        (
            "training.seq_len = 16",
            "training.seq_len = 8",
            "training.seq_len was 16 when the checkpoint was made and is 8",
        ),
        ("training.param_dtype = 'f32'", "training.param_dtype = 'bf16'", "training.param_dtype was \"f32\" when"),
        (
            "",
            "optimizer.state_dtype = 'bf16'\n",
            "optimizer.state_dtype was absent when the checkpoint was made and is \"bf16\"",
        ),
        ("", "data.tokenizer = 'bytes'\n", "data.tokenizer was absent when"),
        (
            "",
            "optimizer.betas = [0.9, 0.99]\n",
            "optimizer.betas was absent when the checkpoint was made and is [0.9, 0.99]",
        ),
    ] {
        let error = text(changes(&table(was), &table(&was.replacen(line, changed, 1))));
        assert!(error.starts_with(says), "{error}");
    }
    let more = "\ncheckpoint.save_total_limit = 1\nfloat8.schedule.warmup = 2";
    let longer = table(&(was.replace("12", "14").replace("5e-3", "1e-3") + more));
    let changes: Vec<_> = changes(&table(was), &longer).unwrap().into_iter().map(|change| change.key).collect();
    assert_eq!(changes, ["checkpoint.save_total_limit", "float8.schedule.warmup", "optimizer.lr", "training.steps"]);
}
