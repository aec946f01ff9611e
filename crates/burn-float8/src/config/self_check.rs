//! [`SelfCheck`].
use serde::{Deserialize, Serialize};

/// Self-check of kernels: comparison with the scalar reference on first use on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum SelfCheck {
    /// Check each compiled kernel once, on generated operands. A wrong kernel is disabled.
    #[default]
    FirstUse,
    /// No checks of kernels, and no check of the device when a configuration is applied.
    Off,
}
