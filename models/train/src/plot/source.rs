//! Metrics files to plot, and names of their runs.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::metrics::{METRICS_FILE, Record, RunRecord, TrainRecord, read_metrics};

use super::error::PlotError;
use super::health::Health;
use super::series::{Point, drawable, smoothing};

/// A run to plot.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotSource {
    /// Name; if `None`, the name of its folder, or of its file if it is not called `metrics.jsonl`.
    pub name: Option<String>,
    /// Folder with a `metrics.jsonl`, or such a file.
    pub path: PathBuf,
}

impl PlotSource {
    /// Parses `PATH` or `NAME=PATH`. An existing path is taken as such, even if it contains `=`.
    ///
    /// # Errors
    /// [`PlotError::EmptyName`].
    pub fn parse(argument: &OsStr) -> Result<Self, PlotError> {
        let unnamed = Self { name: None, path: argument.into() };
        match argument.to_str().and_then(|text| text.split_once('=')) {
            Some(_) if unnamed.path.exists() => Ok(unnamed),
            Some(("", _)) => Err(PlotError::EmptyName { argument: argument.to_string_lossy().into() }),
            Some((name, path)) => Ok(Self { name: Some(name.into()), path: path.into() }),
            None => Ok(unnamed),
        }
    }

    /// Path of the metrics file.
    fn file(&self) -> Result<PathBuf, PlotError> {
        let file = if self.path.is_dir() { self.path.join(METRICS_FILE) } else { self.path.clone() };
        match (file.exists(), self.path.exists()) {
            (true, _) => Ok(file),
            (_, true) => Err(PlotError::NoMetrics { folder: self.path.clone() }),
            (_, false) => Err(PlotError::NotFound { path: self.path.clone() }),
        }
    }
}

/// Measurements of a run, in the order of steps.
#[derive(Debug, Default)]
pub(super) struct PlotRun {
    pub name: String,
    /// Precision, recipe and device.
    pub what: String,
    /// Step at which it diverged.
    pub diverged: Option<usize>,
    pub loss: Vec<Point>,
    pub held_out: Vec<Point>,
    pub tokens_per_second: Vec<Point>,
    pub grad_norm: Vec<Point>,
    pub lr: Vec<Point>,
    pub health: Health,
}

impl PlotRun {
    fn new(name: String, records: &[Record]) -> Self {
        // The last line of a step counts.
        let trains: BTreeMap<_, _> = records.iter().filter_map(|r| Some((r.step, r.train.as_ref()?))).collect();
        let held_out: BTreeMap<_, _> = records.iter().filter_map(|r| Some((r.step, r.held_out_loss?))).collect();
        let of = |value: fn(&TrainRecord) -> f64| -> Vec<Point> {
            trains.iter().map(|(step, train)| (*step, drawable(value(train)))).collect()
        };
        let mut losses: BTreeMap<_, _> = trains.iter().map(|(step, train)| (*step, drawable(train.loss))).collect();
        let diverged = records.iter().rfind(|record| record.diverged.is_some()).map(|record| record.step);
        losses.extend(diverged.map(|step| (step, f64::NAN)));
        Self {
            name,
            diverged,
            what: records.iter().rev().find_map(|record| record.run.as_ref()).map_or(String::new(), what),
            loss: losses.into_iter().collect(),
            held_out: held_out.into_iter().map(|(step, loss)| (step, drawable(loss))).collect(),
            // Only steps with a line in the log have it.
            tokens_per_second: of(|train| train.tokens_per_second)
                .into_iter()
                .filter(|point| !point.1.is_nan())
                .collect(),
            grad_norm: of(|train| train.grad_norm),
            lr: of(|train| train.lr),
            health: Health::new(records),
        }
    }

    fn is_empty(&self) -> bool {
        self.loss.is_empty() && self.held_out.is_empty() && self.health.layers.is_empty()
    }
}

/// Number of points of the longest loss curve.
pub(super) fn longest(runs: &[PlotRun]) -> usize {
    runs.iter().flat_map(|run| [run.loss.len(), run.held_out.len()]).max().unwrap_or(0)
}

/// Weight of [smoothing](super::series::smoothed) for these runs; 0 disables it.
pub(super) fn weight(runs: &[PlotRun]) -> f64 {
    smoothing(runs.iter().map(|run| run.loss.len()).max().unwrap_or(0))
}

fn what(run: &RunRecord) -> String {
    let words = [Some(run.precision.as_str()), run.recipe.as_deref(), Some("on"), Some(run.device.as_str())];
    let words: Vec<_> = words.into_iter().flatten().filter(|word| !word.is_empty()).collect();
    words.join(" ").trim_end_matches("on").trim().into()
}

/// Reads the runs. At least one must have something to plot.
pub(super) fn read(sources: &[PlotSource]) -> Result<Vec<PlotRun>, PlotError> {
    let files: Vec<_> = sources.iter().map(PlotSource::file).collect::<Result<_, _>>()?;
    let mut runs = vec![];
    for (name, file) in names(sources, &files)?.into_iter().zip(&files) {
        runs.push(PlotRun::new(name, &read_metrics(file)?));
    }
    match runs.iter().all(PlotRun::is_empty) {
        true => Err(PlotError::NoSteps { paths: files }),
        false => Ok(runs),
    }
}

/// Names of the runs: the given ones, or the shortest path endings that distinguish them.
fn names(sources: &[PlotSource], files: &[PathBuf]) -> Result<Vec<String>, PlotError> {
    let parts: Vec<_> = files.iter().map(|file| parts(file)).collect();
    let mut taken = vec![1; files.len()];
    loop {
        let name = |run: usize| match &sources[run].name {
            Some(name) => name.clone(),
            None => parts[run][parts[run].len() - taken[run]..].join("/"),
        };
        let names: Vec<_> = (0..files.len()).map(name).collect();
        let twin = |run: usize| (0..names.len()).find(|other| *other != run && names[*other] == names[run]);
        let Some((run, other)) = (0..names.len()).find_map(|run| Some((run, twin(run)?))) else { return Ok(names) };
        // Extends all runs of that name at once, so that none keeps the short form.
        let mut grew = false;
        for same in (0..names.len()).filter(|same| names[*same] == names[run] && sources[*same].name.is_none()) {
            grew |= taken[same] < parts[same].len();
            taken[same] = (taken[same] + 1).min(parts[same].len());
        }
        if !grew {
            return Err(PlotError::EqualNames {
                name: names[run].clone(),
                paths: [run, other].map(|i| files[i].clone()),
            });
        }
    }
}

/// Parts of a file's path used for names: folders, and the file's stem unless it is
/// `metrics.jsonl`. At least one.
fn parts(file: &Path) -> Vec<String> {
    let path = fs::canonicalize(file).unwrap_or_else(|_| file.into());
    // Uses the name of a link, not of its target.
    let is_usual = file.file_name().is_some_and(|name| name == METRICS_FILE);
    let named = if is_usual { path.parent().unwrap_or(Path::new("")).into() } else { path.with_extension("") };
    let parts: Vec<_> =
        named.iter().map(|part| part.to_string_lossy().into_owned()).filter(|part| part != "/").collect();
    if parts.is_empty() { vec![METRICS_FILE.into()] } else { parts }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_long_as_they_must_be() {
        let named = |runs: &[(&str, Option<&str>)]| {
            let files: Vec<_> = runs.iter().map(|run| PathBuf::from(run.0)).collect();
            let source = |run: &(&str, Option<&str>)| PlotSource { name: run.1.map(Into::into), path: run.0.into() };
            names(&runs.iter().map(source).collect::<Vec<_>>(), &files)
        };
        let runs = [("/a/x/metrics.jsonl", None), ("/b/x/metrics.jsonl", None), ("/b/y.jsonl", None)];
        assert_eq!(named(&runs).unwrap(), ["a/x", "b/x", "y"]);
        assert_eq!(named(&[("/a/x/metrics.jsonl", None), ("/b/z.jsonl", Some("x"))]).unwrap(), ["a/x", "x"]);
        assert_eq!(named(&[("/metrics.jsonl", None)]).unwrap(), ["metrics.jsonl"]);
        let twice = named(&[("/a/x.jsonl", None), ("/a/x.jsonl", None)]);
        assert!(matches!(twice, Err(PlotError::EqualNames { name, .. }) if name == "a/x"));
        assert!(matches!(named(&[("/a/x", Some("n")), ("/a/y", Some("n"))]), Err(PlotError::EqualNames { .. })));
    }

    #[test]
    fn throughput_is_drawn_of_the_steps_that_have_it() {
        let train = |tokens_per_second| Some(TrainRecord { tokens_per_second, ..TrainRecord::default() });
        let record = |(step, rate)| Record { step, train: train(rate), ..Record::default() };
        let run = PlotRun::new(String::new(), &[(1, 5.0), (2, f64::NAN), (3, 7.0)].map(record));
        assert_eq!((run.tokens_per_second, run.loss.len()), (vec![(1, 5.0), (3, 7.0)], 3));
    }

    #[test]
    fn what_is_known_of_a_run() {
        let run = |precision: &str, recipe: Option<&str>, device: &str| {
            what(&RunRecord {
                precision: precision.into(),
                recipe: recipe.map(Into::into),
                device: device.into(),
                steps: 1,
            })
        };
        assert_eq!(run("fp8", Some("rowwise"), "cpu"), "fp8 rowwise on cpu");
        assert_eq!(run("bf16", None, ""), "bf16");
        assert_eq!(run("", None, ""), "");
    }
}
