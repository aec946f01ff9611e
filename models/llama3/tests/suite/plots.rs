//! `llama3 plot`: names, the output file, and its log line.

use std::path::Path;

use clap::Parser;
use llama3::{Error, Llama3};
use train::cli::Command;
use train::metrics::{METRICS_FILE, MetricsFile, Record, TrainRecord};
use train::plot::PlotError;

use crate::common::cause;

fn plot(runs: &[&str], out: &Path) -> Result<String, Error> {
    let fixed = ["llama3", "plot", "--out", out.to_str().unwrap()];
    let command = Command::try_parse_from(fixed.iter().chain(runs)).unwrap();
    let mut said = vec![];
    assert!(command.job::<Llama3>(&mut said)?.is_none(), "no model");
    Ok(String::from_utf8(said).unwrap())
}

#[test]
fn a_named_run_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let out = folder.path().join("runs.svg");
    let train = TrainRecord { loss: 2.5, ..Default::default() };
    let record = Record { step: 1, train: Some(train), ..Default::default() };
    MetricsFile::append(&folder.path().join(METRICS_FILE)).unwrap().write(&record).unwrap();
    let said = plot(&[&format!("first run={path}")], &out).unwrap();
    assert_eq!(said, format!("plotted: {}\n", out.display()));
    assert!(std::fs::read_to_string(&out).unwrap().contains("first run"));

    let png = plot(&[path], &folder.path().join("runs.png"));
    assert!(matches!(cause(png), PlotError::Extension { .. }));
    assert!(Command::try_parse_from(["llama3", "plot"]).is_err(), "no run");
}
