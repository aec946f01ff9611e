//! Checkpoints of a run: written so that it can go on bit for bit, whenever it was stopped.

mod changes;
mod error;
mod folder;
mod parts;
mod rollback;
mod state;
mod tensors;
mod together;
mod writer;

/// The run's configuration, beside the checkpoints and in each of them.
pub const CONFIG: &str = "config.toml";

/// The folder beside the checkpoints with what else `resume` and `export` need.
pub const ASSETS: &str = "assets";

pub use changes::{Change, MAY_CHANGE, changes};
pub use error::CheckpointError;
pub(crate) use folder::verify_assets;
pub use folder::{
    CheckpointFolder, Which, Worth, Written, best, diverged_step, find_checkpoint, noted_latest, saved_steps,
};
pub use state::SavedRun;
pub(crate) use state::Snapshot;
pub use writer::Checkpoints;
