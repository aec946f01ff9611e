//! [`SelfCheck`].
use serde::{Deserialize, Serialize};

/// Whether kernels are compared with the scalar reference before a process uses them on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum SelfCheck {
    /// Judge each compiled kernel once, on operands of its own. A wrong kernel is disabled.
    #[default]
    FirstUse,
    /// Not at all; nor is the device tried out when a configuration is applied.
    Off,
}
