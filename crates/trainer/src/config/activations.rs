//! [`ActivationCheckpointing`]: which activations stay in memory until backward.

use std::num::NonZero;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which activations stay in memory until backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase", expecting = "expected \"none\", \"full\" or a number of layers, at least 1")]
#[schemars(inline)]
pub enum ActivationCheckpointing {
    /// Keeps all activations.
    #[default]
    None,
    /// Keeps the input of each layer and recomputes the rest in backward.
    Full,
    /// Keeps the input of every n-th layer, and recomputes the activations of n layers at a time.
    #[serde(untagged)]
    Every(NonZero<usize>),
}

impl ActivationCheckpointing {
    /// Number of layers whose activations are recomputed at a time. None keeps all activations.
    pub fn layers(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::Full => Some(1),
            Self::Every(layers) => Some(layers.get()),
        }
    }
}
