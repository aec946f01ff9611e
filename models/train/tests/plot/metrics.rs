//! Lines of `metrics.jsonl`, written and read back.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;

use train::metrics::{METRICS_FILE, Metrics, Record, RunRecord, TrainRecord, read_metrics};

use crate::support::{db, held_out, step};

#[test]
fn lines_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    let run = Record { run: Some(RunRecord { steps: 30, ..Default::default() }), ..Default::default() };
    let health = BTreeMap::from([("layers.0".into(), BTreeMap::from([("input".into(), db(31.5))]))]);
    let all = [run, step(10, 2.5), held_out(10, 2.0), Record { step: 10, health, ..Default::default() }, step(20, 1.5)];
    let mut file = Metrics::append(&path).unwrap();
    all.iter().for_each(|record| file.write(record).unwrap());
    assert_eq!(read_metrics(&path).unwrap(), all);
}

#[test]
fn a_run_that_went_back_keeps_the_later_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    let run = |step| Record { step, run: Some(RunRecord::default()), ..Default::default() };
    let lines = [run(0), step(10, 3.0), step(20, 2.0), step(30, 1.0), run(20), step(30, 0.5)];
    let mut file = Metrics::append(&path).unwrap();
    lines.iter().for_each(|record| file.write(record).unwrap());
    let read = read_metrics(&path).unwrap();
    let steps: Vec<_> = read.iter().filter_map(|r| Some((r.step, r.train.as_ref()?.loss))).collect();
    assert_eq!(steps, [(10, 3.0), (20, 2.0), (30, 0.5)]);
}

#[test]
fn an_unfinished_last_line_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    Metrics::append(&path).unwrap().write(&step(1, f64::NAN)).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\": 2, \"lo").unwrap();
    assert_eq!(read_metrics(&path).unwrap().len(), 1);
    Metrics::append(&path).unwrap().write(&step(3, 1.0)).unwrap();
    let read = read_metrics(&path).unwrap();
    assert_eq!(read.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 3]);
    assert!(read[0].train.as_ref().unwrap().loss.is_nan(), "not finite");
}

#[test]
fn a_line_has_a_step_if_it_has_a_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS_FILE);
    let train = TrainRecord { loss: 2.5, grad_norm: 1.0, lr: 0.1, ..Default::default() };
    for (line, expected) in [
        (r#"{"step": 1, "loss": 2.5, "grad_norm": 1, "lr": 0.1, "mood": "good"}"#, Ok(Some(train))),
        (r#"{"step": 1, "lr": 0.1}"#, Ok(None)),
        (
            r#"{"step": 1, "loss": "low", "grad_norm": 1, "lr": 0.1}"#,
            Err(":1: not a line of metrics.jsonl: invalid type: string"),
        ),
        (r#"{"step": 1, "loss": 2.5, "lr": 0.1}"#, Err(":1: not a line of metrics.jsonl: missing field `grad_norm`")),
    ] {
        fs::write(&path, format!("{line}\n")).unwrap();
        match (read_metrics(&path), expected) {
            (Ok(records), Ok(expected)) => assert_eq!(records[0].train, expected, "{line}"),
            (Err(error), Err(text)) => assert!(format!("{error:#}").contains(text), "{error:#}"),
            (read, _) => panic!("{line}: {read:?}"),
        }
    }
}
