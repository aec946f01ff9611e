//! A test run: its text, settings and folder; starting, stopping and resuming it; and its results.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;

use crate::support::{command, small, stdout, text, train};

pub(super) const RECIPES: [&str; 7] =
    ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "mxfp8_wgrad_with_hp"];

/// Default number of steps.
pub(super) const STEPS: usize = 12;

/// Text, shared by runs that are compared, because a checkpoint names its files.
pub(super) type Text = Arc<(TempDir, String)>;

/// A run's text, arguments and folder.
pub(super) struct Case {
    pub(super) text: Text,
    pub(super) settings: Vec<String>,
    pub(super) steps: usize,
    pub(super) folder: TempDir,
}

impl Case {
    /// Accumulates micro-batches. Linears run in FP8 from the fifth step to the tenth.
    pub(super) fn new(settings: &[&str]) -> Self {
        Self::on(&Arc::new(text()), settings)
    }

    pub(super) fn on(text: &Text, settings: &[&str]) -> Self {
        let fixed = [
            "training.grad_accumulation=3",
            "float8.schedule={ warmup = 4, cooldown = 2 }",
            "checkpoint.save_steps=2",
            "checkpoint.save_total_limit=2",
        ];
        let settings = fixed.iter().chain(settings).map(|setting| setting.to_string()).collect();
        Self { text: text.clone(), settings, steps: STEPS, folder: tempfile::tempdir().unwrap() }
    }

    pub(super) fn recipe(text: &Text, name: &str) -> Self {
        Self::on(text, &[&format!("float8.recipe={name}")])
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn train(&self) -> Command {
        let settings: Vec<_> = self.settings.iter().map(String::as_str).collect();
        let mut command = train(&small(&self.text.1, &settings));
        let steps = self.steps.to_string();
        command.args(["--steps", &steps, "--output-dir", self.path()]);
        command
    }

    pub(super) fn resume(&self, arguments: &[&str]) -> Command {
        command(&[&["resume", self.path()], arguments].concat())
    }

    /// Resumes the run if it exists, else starts it.
    pub(super) fn go_on(&self) -> Command {
        if self.folder().join("config.toml").exists() { self.resume(&[]) } else { self.train() }
    }

    pub(super) fn path(&self) -> &str {
        self.folder().to_str().unwrap()
    }

    pub(super) fn saved(&self) -> Vec<u64> {
        trainer::checkpoint::saved_steps(self.folder()).unwrap()
    }
}

/// Loss and gradient norm of each step, as printed.
pub(super) fn losses(log: &str) -> BTreeMap<usize, String> {
    let lines = log.lines().filter(|line| line.contains("  loss: "));
    let step = |line: &str| {
        let (step, rest) = line.strip_prefix("step:")?.split_once("loss:")?;
        Some((step.trim().parse().ok()?, rest.split("memory:").next()?.trim().to_string()))
    };
    lines.filter_map(step).collect()
}

/// Complete state of a run: parameters, moments and `state.json` of its last checkpoint.
pub(super) fn end_of(folder: &Path) -> Vec<Vec<u8>> {
    let last = folder.join(format!("step-{STEPS:09}"));
    ["model.safetensors", "optimizer.safetensors", "state.json"].map(|name| fs::read(last.join(name)).unwrap()).to_vec()
}

pub(super) fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub(super) fn kill(child: &Child, signal: &str) {
    let _ = Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
}

pub(super) fn wait_for_step(child: &mut Child, step: usize) -> String {
    let mut log = Vec::new();
    let mut byte = [0];
    let stdout = child.stdout.as_mut().unwrap();
    let wanted = format!("step: {step:2}  loss");
    while !String::from_utf8_lossy(&log).contains(&wanted) {
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "ended before step {step}: {}", String::from_utf8_lossy(&log));
        log.extend(byte);
    }
    String::from_utf8(log).unwrap()
}

/// A completed run, shared by tests that damage copies of it.
pub(super) fn ended(settings: &[&str]) -> Case {
    let case = Case::new(settings);
    stdout(&case.train().output().unwrap());
    case
}
