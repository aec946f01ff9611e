//! Errors of checkpoints. Each variant carries the wrong values and suggests a fix.

use std::io;
use std::path::PathBuf;

use burn_float8::Float8Error;

use crate::config::ConfigError;

/// Error of a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The ranks of a sharded run could not complete a checkpoint.
    #[error(transparent)]
    Ranks(#[from] float8_shard::CommError),
    /// Another run is writing to this folder.
    #[error("another run is writing to {}: wait for it or stop it, or give this one another checkpoint.folder", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// A new run was given the folder of an existing one.
    #[error("{} holds a run of {step} steps: `resume` goes on with it; a new run needs another checkpoint.folder", folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// Steps at the newest checkpoint.
        step: u64,
    },
    /// A new run would replace a file that belongs to no run.
    #[error("{} is of no run, and a run would replace it: give another checkpoint.folder, or move it away", path.display())]
    Foreign {
        /// The file or folder.
        path: PathBuf,
    },
    /// A new run was given the folder of a diverged one.
    #[error(
        "{} holds a run that diverged at step {step} before it had a checkpoint: give the new run another checkpoint.folder, or remove this one",
        folder.display()
    )]
    Diverged {
        /// The folder.
        folder: PathBuf,
        /// The step.
        step: u64,
    },
    /// The folder has no run.
    #[error("{} holds no run: no config.toml and no checkpoint", folder.display())]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// The checkpoint does not exist.
    #[error("{} has no checkpoint `{wanted}`; there are {}", folder.display(), steps(have))]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// `newest`, `best`, the step, or the name in LATEST.
        wanted: String,
        /// Steps with a checkpoint.
        have: Vec<u64>,
    },
    /// A file or folder could not be read or written.
    #[error("cannot {doing} {}{}", path.display(), hint(source))]
    Io {
        /// `read`, `write`, ...
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file differs from what was written.
    #[error("{} is damaged: {reason}. {}", path.display(), others(have))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
        /// Steps with another checkpoint.
        have: Vec<u64>,
    },
    /// A checkpoint of another format version.
    #[error("{} has format {found}, this program reads {expected}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// Supported format.
        expected: u32,
    },
    /// Invalid JSON in a file.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A tensor file does not fit the model or could not be written.
    #[error(transparent)]
    Tensors(anyhow::Error),
    /// A tensor could not be read from its device.
    #[error("the device failed while {tensor} was read: {reason}")]
    Device {
        /// Name of the tensor.
        tensor: String,
        /// The device's reason.
        reason: String,
    },
    /// A tensor is not finite after the last step.
    #[error(
        "training diverged: {tensor} is not finite after step {step}, which is not saved. Checkpoints that were there are whole: `resume` goes \
         on from the newest, and may lower optimizer.lr"
    )]
    NotFinite {
        /// The parameter, moment or master.
        tensor: String,
        /// The step.
        step: usize,
    },
    /// A key was changed that must stay the same.
    #[error(
        "{key} was {saved} when the checkpoint was made and is {now} now: a run cannot be resumed with another; start a new run, or leave it as it was"
    )]
    ConfigChanged {
        /// The dotted key.
        key: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        now: String,
    },
    /// The saved configuration does not parse.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The FP8 state is not the model's.
    #[error(transparent)]
    Float8(#[from] Float8Error),
}

impl From<anyhow::Error> for CheckpointError {
    fn from(error: anyhow::Error) -> Self {
        error.downcast().unwrap_or_else(Self::Tensors)
    }
}

fn steps(steps: &[u64]) -> String {
    if steps.is_empty() {
        return "none".into();
    }
    let steps: Vec<_> = steps.iter().map(u64::to_string).collect();
    format!("step {}", steps.join(", "))
}

fn others(steps: &[u64]) -> String {
    match steps {
        [] => "There is no copy of it".into(),
        steps => format!("There are checkpoints of {}: `--step N` takes one of them", self::steps(steps)),
    }
}

/// Advice for a full disk. Existing checkpoints are intact.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            ": make room, or lower checkpoint.keep; checkpoints that were there are whole"
        }
        _ => "",
    }
}
