//! Checkpoints of earlier versions. That in `tests/old_run` is of a run of six steps, killed after the third, by a version that had
//! `training.save_fp8_operands` and no `optimizer.weight_decay_all`.

use std::fs;
use std::path::{Path, PathBuf};

use train::metrics::read_metrics;

use crate::support::{llama3, stderr, stdout};

fn old_run() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/old_run")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() { copy(&entry.path(), &to) } else { fs::copy(entry.path(), to).map(drop).unwrap() }
    }
}

/// With the losses that the version which began it went on to.
#[test]
fn a_run_of_an_earlier_version_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    copy(&old_run(), folder.path());
    let (run, text) = (folder.path().to_str().unwrap(), folder.path().join("text.txt"));
    let resumed = llama3(&["resume", run, "--data", text.to_str().unwrap()]);
    let log = stdout(&resumed);
    assert!(log.contains("ignored: training.save_fp8_operands is gone"), "{log}");
    let records = read_metrics(&folder.path().join("metrics.jsonl")).unwrap();
    let losses: Vec<_> = records.iter().filter_map(|record| Some((record.step, record.train.as_ref()?.loss))).collect();
    assert_eq!(losses, [(4, 6.088_574_409_484_863), (5, 6.045_754_432_678_223), (6, 5.760_181_427_001_953)]);
}

/// The error says so before anything else is read.
#[test]
fn a_checkpoint_of_another_format_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    copy(&old_run(), folder.path());
    let (file, sums) = (folder.path().join("step-000000003/state.json"), "step-000000003/checksums.json");
    let state = fs::read_to_string(&file).unwrap().replace("\"format\":1", "\"format\":2");
    fs::write(&file, &state).unwrap();
    // As somebody has written it.
    let sums = folder.path().join(sums);
    let was = train::digest_of_file(&old_run().join("step-000000003/state.json")).unwrap();
    let now = train::digest_of_file(&file).unwrap();
    fs::write(&sums, fs::read_to_string(&sums).unwrap().replace(&was, &now)).unwrap();
    let output = llama3(&["resume", folder.path().to_str().unwrap()]);
    let error = stderr(&output);
    assert!(error.contains("state.json") && error.contains("format 2"), "{error}");
}
