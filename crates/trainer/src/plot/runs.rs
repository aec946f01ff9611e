//! Metrics files to plot, and names of their runs.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use crate::metrics::{METRICS_FILE, Record, better, read_metrics, thousands};

/// A step and its value.
pub(super) type Point = (f64, f64);

/// A run to plot.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotSource {
    /// Name; if `None`, the last part of its path, or the path if another run ends alike.
    pub name: Option<String>,
    /// Folder with a `metrics.jsonl`, or such a file.
    pub path: PathBuf,
}

impl PlotSource {
    /// Parses `PATH` or `NAME=PATH`. An existing path is taken as such, even if it contains `=`.
    ///
    /// # Errors
    /// An empty name.
    pub fn parse(argument: &OsStr) -> Result<Self> {
        let unnamed = Self { name: None, path: argument.into() };
        match argument.to_str().and_then(|text| text.split_once('=')) {
            Some(_) if unnamed.path.exists() => Ok(unnamed),
            Some(("", _)) => bail!("`{}`: the name before `=` is empty", argument.display()),
            Some((name, path)) => Ok(Self { name: Some(name.into()), path: path.into() }),
            None => Ok(unnamed),
        }
    }

    /// Name among these runs.
    fn name_among(&self, all: &[Self]) -> String {
        fn end(path: &Path) -> Option<&OsStr> {
            if path.is_dir() { path.file_name() } else { path.file_stem() }
        }
        let own = end(&self.path);
        let is_only = all.iter().filter(|other| end(&other.path) == own).count() == 1;
        let unnamed = || own.filter(|_| is_only).unwrap_or(self.path.as_os_str()).display().to_string();
        self.name.clone().unwrap_or_else(unnamed)
    }

    /// Path of the metrics file.
    fn file(&self) -> Result<PathBuf> {
        let path = self.path.display();
        ensure!(
            self.path.exists(),
            "there is no {path}: give the folder that holds a run's {METRICS_FILE}, or such a file"
        );
        let file = if self.path.is_dir() { self.path.join(METRICS_FILE) } else { self.path.clone() };
        ensure!(file.exists(), "{path} holds no {METRICS_FILE}: give the folder of a run that has written one");
        Ok(file)
    }
}

/// Measurements of a run that can be drawn, in the order of steps.
#[derive(Debug)]
pub(super) struct PlottedRun {
    pub name: String,
    /// Step at which it diverged.
    pub diverged: Option<usize>,
    pub loss: Vec<Point>,
    pub held_out: Vec<Point>,
    pub tokens_per_second: Vec<Point>,
    pub grad_norm: Vec<Point>,
    pub lr: Vec<Point>,
    pub records: Vec<Record>,
}

impl PlottedRun {
    fn new(name: &str, records: Vec<Record>) -> Self {
        // The last line of a step counts. Larger values would overflow an axis.
        let points = |value: fn(&Record) -> Option<f64>| -> Vec<Point> {
            let steps: BTreeMap<_, _> = records.iter().filter_map(|r| Some((r.step, value(r)?))).collect();
            steps.into_iter().filter(|point| point.1.abs() <= 1e30).map(|(step, value)| (step as f64, value)).collect()
        };
        let is_lost =
            |r: &&Record| r.diverged.is_some() || r.train.as_ref().is_some_and(|train| !train.loss.is_finite());
        Self {
            name: shown(name),
            diverged: records.iter().find(is_lost).map(|record| record.step),
            loss: points(|r| Some(r.train.as_ref()?.loss)),
            held_out: points(|r| r.validation_loss),
            tokens_per_second: points(|r| r.train.as_ref()?.tokens_per_second),
            grad_norm: points(|r| Some(r.train.as_ref()?.grad_norm)),
            lr: points(|r| Some(r.train.as_ref()?.lr)),
            records,
        }
    }

    /// Name, precision, recipe, device and result.
    pub(super) fn label(&self) -> String {
        let run = self.records.iter().rev().find_map(|record| record.run.clone()).unwrap_or_default();
        let device = if run.device.is_empty() { String::new() } else { format!("on {}", run.device) };
        let words = [run.precision, run.recipe.unwrap_or_default(), device];
        let what: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
        let loss = |loss: f64| if loss.abs() < 1e5 { format!("{loss:.4}") } else { format!("{loss:.3e}") };
        let steps = || self.held_out.iter().map(|(step, loss)| (*step as usize, *loss));
        let result = match (self.diverged, steps().next_back(), steps().reduce(better)) {
            (Some(step), ..) => format!("diverged at step {}", thousands(&step.to_string())),
            (_, Some((_, last)), Some((step, best))) => {
                let step = thousands(&step.to_string());
                format!("validation: last {}, best {} (step {step})", loss(last), loss(best))
            }
            _ => "no validation loss".into(),
        };
        [self.name.clone(), what.join(" "), result]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(" · ")
    }
}

/// `text` without characters that XML does not allow, and cut in the middle if it is long, because
/// names differ at their ends.
fn shown(text: &str) -> String {
    let allowed = |c: char| if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') { '\u{FFFD}' } else { c };
    let letters: Vec<_> = text.chars().map(allowed).collect();
    match letters.len() {
        0..=48 => letters.iter().collect(),
        n => letters[..24].iter().chain(&['…']).chain(&letters[n - 23..]).collect(),
    }
}

/// Reads the metrics of the runs.
///
/// # Errors
/// Files that cannot be read, and two runs of one name.
pub(super) fn read(sources: &[PlotSource]) -> Result<Vec<PlottedRun>> {
    let mut files = BTreeMap::new();
    let read = |source: &PlotSource| {
        let (name, file) = (source.name_among(sources), source.file()?);
        if let Some(other) = files.insert(name.clone(), file.clone()) {
            let [a, b] = [other.display(), file.display()];
            bail!("two runs are called {name}: {a} and {b}; name one of them with NAME=PATH");
        }
        Ok(PlottedRun::new(&name, read_metrics(&file)?))
    };
    sources.iter().map(read).collect()
}
