//! [`ActivationCheckpointing`]: which activations stay in memory until backward.

use std::borrow::Cow;
use std::num::NonZero;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::Written;

/// Which activations stay in memory until backward. `"none"` keeps all of them. `"full"` keeps the
/// input of each layer and recomputes the rest in backward. A number n keeps the input of every
/// n-th layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum ActivationCheckpointing {
    /// Keeps all activations.
    #[default]
    None,
    /// Keeps the input of every n-th layer.
    Every(NonZero<usize>),
}

impl JsonSchema for ActivationCheckpointing {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "ActivationCheckpointing".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["integer", "string"], "minimum": 1, "pattern": "^(none|full)$" })
    }
}

impl TryFrom<Written> for ActivationCheckpointing {
    type Error = &'static str;

    fn try_from(written: Written) -> Result<Self, &'static str> {
        match written {
            Written::Number(layers) => NonZero::new(layers).map(Self::Every).ok_or("must be at least 1 layer"),
            Written::Text(text) if text == "none" => Ok(Self::None),
            Written::Text(text) if text == "full" => Ok(Self::Every(NonZero::<usize>::MIN)),
            Written::Text(_) => Err("must be \"none\", \"full\" or a number of layers"),
        }
    }
}

impl From<ActivationCheckpointing> for Written {
    fn from(mode: ActivationCheckpointing) -> Self {
        match mode {
            ActivationCheckpointing::None => Self::Text("none".into()),
            ActivationCheckpointing::Every(NonZero::<usize>::MIN) => Self::Text("full".into()),
            ActivationCheckpointing::Every(layers) => Self::Number(layers.get()),
        }
    }
}
