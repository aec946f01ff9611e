//! [`ActivationCheckpointing`]: which activations stay in memory until backward.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZero;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Which activations stay in memory until backward. `"none"` keeps all of them. `"full"` keeps the
/// input of each layer and recomputes the rest in backward. A number n keeps the input of every
/// n-th layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

impl Serialize for ActivationCheckpointing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_str("none"),
            Self::Every(NonZero::<usize>::MIN) => serializer.serialize_str("full"),
            Self::Every(layers) => layers.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for ActivationCheckpointing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mode;
        impl Visitor<'_> for Mode {
            type Value = ActivationCheckpointing;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"none\", \"full\" or a number of layers, at least 1")
            }

            fn visit_u64<E: Error>(self, layers: u64) -> Result<ActivationCheckpointing, E> {
                let layers = usize::try_from(layers).ok().and_then(NonZero::new);
                layers.map(ActivationCheckpointing::Every).ok_or_else(|| E::custom("must be at least 1 layer"))
            }

            fn visit_i64<E: Error>(self, layers: i64) -> Result<ActivationCheckpointing, E> {
                self.visit_u64(u64::try_from(layers).unwrap_or(0))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ActivationCheckpointing, E> {
                match text {
                    "none" => Ok(ActivationCheckpointing::None),
                    "full" => Ok(ActivationCheckpointing::Every(NonZero::<usize>::MIN)),
                    _ => Err(E::custom(format!("`{text}` is not \"none\", \"full\" or a number of layers"))),
                }
            }
        }
        deserializer.deserialize_any(Mode)
    }
}
