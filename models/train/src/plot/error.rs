//! What keeps runs from being drawn.

use std::path::PathBuf;

use plotters::drawing::DrawingAreaErrorKind;

use crate::metrics::{METRICS_FILE, MetricsError};

use super::kind::PlotPanel;

/// What keeps runs from being drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// A run that is not there.
    #[error("there is no {}: give the folder that holds a run's {METRICS_FILE}, or such a file", path.display())]
    NotFound {
        /// What was given.
        path: PathBuf,
    },
    /// A folder that no run has written to.
    #[error("{} holds no {METRICS_FILE}: give the folder of a run that has written one", folder.display())]
    NoMetrics {
        /// What was given.
        folder: PathBuf,
    },
    /// A file that cannot be read, or is not of a run.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Nothing has been measured yet.
    #[error("no steps in {}", paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoSteps {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// No run has data for the panels that were asked for.
    #[error("none of these runs has what {} would show", kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "))]
    NoPanels {
        /// What was asked for.
        kinds: Vec<PlotPanel>,
    },
    /// `=PATH`.
    #[error("`{argument}`: the name before `=` is empty")]
    EmptyName {
        /// What was given.
        argument: String,
    },
    /// Curves that could not be told apart.
    #[error("two runs are called {name}: {} and {}; name one of them with NAME=PATH", paths[0].display(), paths[1].display())]
    EqualNames {
        /// The name.
        name: String,
        /// The files.
        paths: [PathBuf; 2],
    },
    /// A format that is not written.
    #[error("{}: pictures are written as .svg, not as {}", path.display(), path.extension().map_or("a file without an extension".into(), |extension| format!(".{}", extension.display())))]
    Extension {
        /// The file asked for.
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
    /// The library that draws has failed.
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
