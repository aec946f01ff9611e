//! Where a run is in its data.

use serde::{Deserialize, Serialize};

/// Temporary.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Sequences taken.
    pub taken: u64,
}
