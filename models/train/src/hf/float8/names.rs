//! [`Names`]: which linears of a checkpoint the lists of a `quantization_config` mean.

use fancy_regex::{Regex, RegexBuilder};

use super::error::Float8FilesError;
use crate::hf::reader::HfReader;

/// The class of all linears, for which `Linear` stands in a list.
const CLASS: &str = "Linear";

/// Steps back that a pattern may take in a name, so that hundreds of patterns are matched with hundreds of names at once.
const MAX_BACKTRACKS: usize = 10_000;

/// Names and patterns of modules.
#[derive(Debug)]
pub(super) struct Names(Vec<Name>);

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
        Ok(Self(list.iter().map(parse).collect::<Result<_, _>>()?))
    }

    /// The lists of `quant_method: fp8`. As transformers has it, each entry is a pattern for the beginning of a name up to the end of one of
    /// its parts, or the end of a name; vLLM's exact names are among these. `re:` patterns are read too.
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
        Ok(Self(list.iter().map(parse).collect::<Result<_, _>>()?))
    }

    /// The lists of ModelOpt and Quark: names of linears and of modules that hold some. `*` matches anything.
    ///
    /// # Errors
    /// [`Float8FilesError::Pattern`].
    pub(super) fn globs(config: &HfReader<'_>, key: &'static str, list: &[&str]) -> Result<Self, Float8FilesError> {
        let parse = |name: &&str| {
            let parts: Vec<_> = name.split('*').map(fancy_regex::escape).collect();
            Ok(Name::Matches(regex(config, key, name, &format!(r"^{}(?:\.|$)", parts.join(".*")))?))
        };
        Ok(Self(list.iter().map(parse).collect::<Result<_, _>>()?))
    }

    /// How closely the linear `module` is named, if it is.
    pub(super) fn find(&self, module: &str) -> Option<Closeness> {
        let closeness = |name: &Name| match name {
            Name::AllLinears => Some(Closeness::Class),
            Name::Exact(name) => (name == module).then_some(Closeness::Exact),
            Name::Matches(regex) => is_match(regex, module).then_some(Closeness::Pattern),
            Name::Ends(regex, end) => (is_match(regex, module) || module.ends_with(end)).then_some(Closeness::Pattern),
        };
        self.0.iter().filter_map(closeness).max()
    }
}

fn regex(config: &HfReader<'_>, key: &str, pattern: &str, whole: &str) -> Result<Regex, Float8FilesError> {
    RegexBuilder::new(whole).backtrack_limit(MAX_BACKTRACKS).build().map_err(|error| Float8FilesError::Pattern {
        path: config.path.into(),
        key: config.full(key),
        pattern: pattern.into(),
        reason: error.to_string(),
    })
}

/// A pattern that gives up on a name of a few dozen letters does not match it.
fn is_match(regex: &Regex, name: &str) -> bool {
    regex.is_match(name).unwrap_or(false)
}
