//! Errors of plotting.

use std::path::PathBuf;

use plotters::drawing::DrawingAreaErrorKind;

use crate::metrics::{METRICS_FILE, MetricsError};

use super::kind::PlotPanel;

/// Error of plotting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The path does not exist.
    #[error("there is no {}: give the folder that holds a run's {METRICS_FILE}, or such a file", path.display())]
    NotFound {
        /// The given path.
        path: PathBuf,
    },
    /// The folder has no metrics file.
    #[error("{} holds no {METRICS_FILE}: give the folder of a run that has written one", folder.display())]
    NoMetrics {
        /// The given folder.
        folder: PathBuf,
    },
    /// A metrics file cannot be read or is invalid.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// No run has any steps.
    #[error("no steps in {}", paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoSteps {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// No run has data for the requested panels.
    #[error("none of these runs has what {} would show", kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "))]
    NoPanels {
        /// The requested panels.
        kinds: Vec<PlotPanel>,
    },
    /// An argument `=PATH` with an empty name.
    #[error("`{argument}`: the name before `=` is empty")]
    EmptyName {
        /// The argument.
        argument: String,
    },
    /// Two runs have the same name.
    #[error("two runs are called {name}: {} and {}; name one of them with NAME=PATH", paths[0].display(), paths[1].display())]
    EqualNames {
        /// The name.
        name: String,
        /// The files.
        paths: [PathBuf; 2],
    },
    /// Unsupported file format.
    #[error("{}: pictures are written as .svg, not as {}", path.display(), path.extension().map_or("a file without an extension".into(), |extension| format!(".{}", extension.display())))]
    Extension {
        /// The given file.
        path: PathBuf,
    },
    /// The picture could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The plotting library failed.
    #[error("cannot draw: {reason}")]
    Draw {
        /// Its reason.
        reason: String,
    },
}

impl From<DrawingAreaErrorKind<std::io::Error>> for PlotError {
    fn from(error: DrawingAreaErrorKind<std::io::Error>) -> Self {
        Self::Draw { reason: error.to_string() }
    }
}
