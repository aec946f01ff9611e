//! Checkpoints of a run, from which it resumes bit for bit.

mod config_diff;
mod error;
mod folder;

mod rollback;
mod sharded_tensors;
mod state;
mod tensors;
mod together;
mod writer;

/// Configuration of the run, next to the checkpoints and in each of them.
pub const CONFIG: &str = "config.toml";

/// Folder next to the checkpoints with the other files that `resume` and `export` need.
pub const ASSETS: &str = "assets";

pub use config_diff::{Change, MAY_CHANGE, changes};
pub use error::CheckpointError;
pub(crate) use folder::verify_assets;
pub use folder::{
    CheckpointFolder, Which, Worth, Written, best, diverged_step, find_checkpoint, noted_latest, saved_steps,
};
pub use state::SavedRun;
pub(crate) use state::Snapshot;
pub use writer::Checkpoints;
