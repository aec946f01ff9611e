//! Checkpoints of a run, from which it resumes bit for bit.

mod checksums;
mod config_diff;
mod folder;
mod sharded_tensors;
mod state;
mod tensors;
mod writer;

use std::path::Path;

/// Configuration of the run, next to the checkpoints and in each of them.
pub const CONFIG: &str = "config.toml";

/// Folder next to the checkpoints with the other files that `resume` and `export` need.
pub const ASSETS: &str = "assets";

pub(crate) use checksums::verify_assets;
pub use config_diff::{Change, MAY_CHANGE, changes};
pub(crate) use folder::missing;
pub use folder::{
    CheckpointFolder, CheckpointKind, Which, Written, best, diverged_step, find_checkpoint, noted_latest, saved_steps,
};
pub(crate) use sharded_tensors::SavedTensors;
pub use state::SavedRun;
pub(crate) use state::Snapshot;
pub use tensors::NotFinite;
pub use writer::Checkpoints;

/// Context of an error: what could not be done to a file.
fn cannot(doing: &str, path: &Path) -> impl FnOnce() -> String {
    let text = format!("cannot {doing} {}", path.display());
    move || text
}
