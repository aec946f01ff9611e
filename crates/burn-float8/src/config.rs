//! [`Float8Config`]: which linears run in FP8, and by which recipe.
use float8_kernels::{Cast, Format, Granularity, ScaleMode};
use globset::Glob;
use serde::{Deserialize, Serialize};

use crate::error::Float8Error;
use crate::layer::{Policy, Reason, Role};

/// How the three operands of a linear are cast (names are torchao's).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recipe {
    /// x and w in e4m3, dy in e5m2, one f32 scale per tensor.
    #[default]
    Tensorwise,
}

impl Recipe {
    /// The cast of an operand.
    pub fn cast(self, role: Role) -> Cast {
        match self {
            Self::Tensorwise => Cast {
                format: if role == Role::GradOutput { Format::E5m2 } else { Format::E4m3 },
                granularity: Granularity::Tensor,
                scale_mode: ScaleMode::F32,
            },
        }
    }
}

impl core::fmt::Display for Recipe {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Tensorwise => "tensorwise",
        })
    }
}

/// Which linears of a model run in FP8, and by which recipe.
///
/// ```
/// use burn_float8::Float8Config;
/// let config = Float8Config::tensorwise().with_filter_fqns(["lm_head"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Float8Config {
    /// How operands are cast.
    pub recipe: Recipe,
    /// Linears to keep in high precision: a name with `*`, `?` or `[` is a glob over the whole name, where `*` also
    /// crosses dots; any other matches where it is a substring of the name (torchtitan's `filter_fqns`).
    pub filter_fqns: Vec<String>,
}

impl Float8Config {
    /// Every linear, by the recipe [`Recipe::Tensorwise`].
    pub fn tensorwise() -> Self {
        Self::default()
    }

    /// Keeps the linears that these names match in high precision; see [`filter_fqns`](Self::filter_fqns).
    pub fn with_filter_fqns(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.filter_fqns = names.into_iter().map(Into::into).collect();
        self
    }

    /// The policy of each linear.
    ///
    /// # Errors
    ///
    /// A pattern that is no valid glob or matches no name; no names at all; nothing left to convert.
    pub(crate) fn policies(&self, names: &[String]) -> Result<Vec<Policy>, Float8Error> {
        if names.is_empty() {
            return Err(Float8Error::NoLinears);
        }
        let mut policies = vec![Policy::Float8(self.recipe); names.len()];
        for pattern in &self.filter_fqns {
            let matches = matcher(pattern)?;
            let mut matched = false;
            for (name, policy) in names.iter().zip(&mut policies) {
                if matches(name) {
                    matched = true;
                    *policy = Policy::HighPrecision(Reason::Filter(pattern.clone()));
                }
            }
            if !matched {
                return Err(Float8Error::FilterMatchesNothing {
                    pattern: pattern.clone(),
                    linears: names.len(),
                    names: shorten(names),
                });
            }
        }
        if policies.iter().all(|p| matches!(p, Policy::HighPrecision(_))) {
            return Err(Float8Error::NothingConverted { patterns: self.filter_fqns.clone(), linears: names.len() });
        }
        Ok(policies)
    }
}

type Matcher = Box<dyn Fn(&str) -> bool>;

fn matcher(pattern: &str) -> Result<Matcher, Float8Error> {
    let owned = pattern.to_string();
    if !pattern.contains(['*', '?', '[']) {
        return Ok(Box::new(move |name| name.contains(&owned)));
    }
    let glob = Glob::new(pattern)
        .map_err(|e| Float8Error::InvalidGlob { pattern: owned, reason: e.kind().to_string() })?
        .compile_matcher();
    Ok(Box::new(move |name| glob.is_match(name)))
}

fn shorten(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text += ", ...";
    }
    text
}
