//! [`Names`]: resolves the lists of a `quantization_config` to linears of a checkpoint.

use std::path::PathBuf;

use fancy_regex::Regex;

use super::error::Float8FilesError;
use crate::hf::names::bounded_regex;
use crate::hf::reader::HfReader;

/// Class of all linears, which lists name as `Linear`.
const CLASS: &str = "Linear";

/// Names and patterns of modules.
#[derive(Debug)]
pub(super) struct Names {
    list: Vec<Name>,
    path: PathBuf,
    key: String,
}

#[derive(Debug)]
enum Name {
    /// The class name in compressed-tensors.
    AllLinears,
    Exact(String),
    Matches(Regex),
    /// A pattern of transformers, which also matches at the end of a name.
    Ends(Regex, String),
}

/// How closely a list names a module; larger is closer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Closeness {
    /// By its class.
    Class,
    /// By a pattern.
    Pattern,
    /// By its name.
    Exact,
}

impl Names {
    fn new(
        config: &HfReader<'_>,
        key: &str,
        list: impl Iterator<Item = Result<Name, Float8FilesError>>,
    ) -> Result<Self, Float8FilesError> {
        Ok(Self { list: list.collect::<Result<_, _>>()?, path: config.path.into(), key: config.full(key) })
    }

    /// Lists of compressed-tensors: names, classes, and patterns after `re:` that match at the
    /// beginning of a name.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn compressed_tensors(
        config: &HfReader<'_>,
        key: &'static str,
        list: &[&str],
    ) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            Ok(match name.strip_prefix("re:") {
                Some(pattern) => Name::Matches(regex(config, key, pattern, &format!("^(?:{pattern})"))?),
                None if *name == CLASS => Name::AllLinears,
                None => Name::Exact((*name).into()),
            })
        };
        Self::new(config, key, list.iter().map(parse))
    }

    /// Lists of `quant_method: fp8`. As in transformers, each entry is a pattern. It matches the
    /// beginning of a name up to the end of one of its parts, or the end of a name. vLLM's exact
    /// names match too, and patterns after `re:` are supported.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn fp8(config: &HfReader<'_>, key: &'static str, list: &[&str]) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            Ok(match name.strip_prefix("re:") {
                Some(pattern) => Name::Matches(regex(config, key, pattern, &format!("^(?:{pattern})"))?),
                None => {
                    let whole = format!(r"^(?:{name})(?:(?<=\.)|(?=\.|$))");
                    Name::Ends(regex(config, key, name, &whole)?, (*name).into())
                }
            })
        };
        Self::new(config, key, list.iter().map(parse))
    }

    /// Lists of ModelOpt and Quark: names of linears and of modules that contain linears. `*`
    /// matches anything.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn globs(config: &HfReader<'_>, key: &'static str, list: &[&str]) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            let parts: Vec<_> = name.split('*').map(fancy_regex::escape).collect();
            Ok(Name::Matches(regex(config, key, name, &format!(r"^{}(?:\.|$)", parts.join(".*")))?))
        };
        Self::new(config, key, list.iter().map(parse))
    }

    /// How closely the linear `module` is named; `None` if it is not.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`] for a pattern that backtracks too often.
    pub(super) fn find(&self, module: &str) -> Result<Option<Closeness>, Float8FilesError> {
        let mut closest = None;
        for name in &self.list {
            let closeness = match name {
                Name::AllLinears => Some(Closeness::Class),
                Name::Exact(name) => (name == module).then_some(Closeness::Exact),
                Name::Ends(_, end) if module.ends_with(end) => Some(Closeness::Pattern),
                Name::Matches(regex) | Name::Ends(regex, _) => {
                    let is_match = regex.is_match(module).map_err(|error| Float8FilesError::Pattern {
                        path: self.path.clone(),
                        key: self.key.clone(),
                        pattern: regex.as_str().into(),
                        reason: format!("on {module}: {error}"),
                    })?;
                    is_match.then_some(Closeness::Pattern)
                }
            };
            closest = closest.max(closeness);
        }
        Ok(closest)
    }
}

fn regex(config: &HfReader<'_>, key: &str, pattern: &str, whole: &str) -> Result<Regex, Float8FilesError> {
    bounded_regex(whole).map_err(|error| Float8FilesError::Pattern {
        path: config.path.into(),
        key: config.full(key),
        pattern: pattern.into(),
        reason: error.to_string(),
    })
}
