//! [`Names`]: which linears of a checkpoint the lists of a `quantization_config` mean.

use std::path::{Path, PathBuf};

use fancy_regex::{Regex, RegexBuilder};

use super::error::Float8FilesError;

/// The class of all linears, for which `Linear` stands in a list.
const CLASS: &str = "Linear";

/// How often a pattern goes back in a name of a few dozen letters.
const STEPS_BACK: usize = 4096;

/// Names and patterns of modules.
#[derive(Debug)]
pub(super) struct Names {
    list: Vec<Name>,
    path: PathBuf,
    key: &'static str,
}

#[derive(Debug)]
enum Name {
    /// compressed-tensors' class name.
    AllLinears,
    Exact(String),
    Matches(Regex),
    /// A pattern of transformers', which counts at the end of a name too.
    Ends(Regex, String),
}

/// How closely a list names a module; more is closer.
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
    /// compressed-tensors' lists: names, classes, and after `re:` patterns that begin where the name does.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn compressed_tensors(path: &Path, key: &'static str, list: &[&str]) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            Ok(match name.strip_prefix("re:") {
                Some(pattern) => Name::Matches(regex(path, key, pattern, &format!("^(?:{pattern})"))?),
                None if *name == CLASS => Name::AllLinears,
                None => Name::Exact((*name).into()),
            })
        };
        Ok(Self { list: list.iter().map(parse).collect::<Result<_, _>>()?, path: path.into(), key })
    }

    /// The lists of `quant_method: fp8`. As transformers has it, each entry is a pattern for the beginning of a name up to the end of one of
    /// its parts, or the end of a name; vLLM's exact names are among these. `re:` patterns are read too.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn fp8(path: &Path, key: &'static str, list: &[&str]) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            Ok(match name.strip_prefix("re:") {
                Some(pattern) => Name::Matches(regex(path, key, pattern, &format!("^(?:{pattern})"))?),
                None => {
                    let whole = format!(r"^(?:{name})(?:(?<=\.)|(?=\.|$))");
                    Name::Ends(regex(path, key, name, &whole)?, (*name).into())
                }
            })
        };
        Ok(Self { list: list.iter().map(parse).collect::<Result<_, _>>()?, path: path.into(), key })
    }

    /// How closely the linear `module` is named, if it is.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`] for a pattern that goes back too often.
    pub(super) fn find(&self, module: &str) -> Result<Option<Closeness>, Float8FilesError> {
        let mut closest = None;
        for name in &self.list {
            let closeness = match name {
                Name::AllLinears => Some(Closeness::Class),
                Name::Exact(name) => (name == module).then_some(Closeness::Exact),
                Name::Ends(_, end) if module.ends_with(end) => Some(Closeness::Pattern),
                Name::Matches(regex) | Name::Ends(regex, _) => {
                    let is_match = regex.is_match(module).map_err(|error| {
                        let (path, pattern, reason) =
                            (self.path.clone(), regex.as_str().into(), format!("on {module}: {error}"));
                        Float8FilesError::Pattern { path, key: self.key, pattern, reason }
                    })?;
                    is_match.then_some(Closeness::Pattern)
                }
            };
            closest = closest.max(closeness);
        }
        Ok(closest)
    }
}

fn regex(path: &Path, key: &'static str, pattern: &str, whole: &str) -> Result<Regex, Float8FilesError> {
    RegexBuilder::new(whole).backtrack_limit(STEPS_BACK).build().map_err(|error| Float8FilesError::Pattern {
        path: path.into(),
        key,
        pattern: pattern.into(),
        reason: error.to_string(),
    })
}
