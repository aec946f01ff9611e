//! Selection of linears by exact name, glob or substring, by size, and by position in the stack.
use globset::Glob;

use crate::error::Float8Error;
use crate::terms::Recipe;

/// A linear of a model, as seen by filters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearInfo {
    /// Path in the module tree.
    pub name: String,
    /// Input features.
    pub k: usize,
    /// Output features.
    pub n: usize,
}

/// Indices of the linears that a pattern matches, at least one. A linear with exactly this name
/// wins. Otherwise a pattern with `*`, `?` or `[` is a glob over the whole name, and any other
/// pattern a substring.
///
/// # Errors
///
/// If the glob is invalid, or nothing matches.
pub(crate) fn matches(field: &'static str, pattern: &str, linears: &[LinearInfo]) -> Result<Vec<usize>, Float8Error> {
    let wrong = |reason: String| Float8Error::config(field, format!("{pattern:?}"), reason);
    // An empty pattern would match every name.
    let indices = |matches: &dyn Fn(&str) -> bool| -> Vec<usize> {
        (0..linears.len()).filter(|i| !pattern.is_empty() && matches(&linears[*i].name)).collect()
    };
    let mut found = indices(&|name| name == pattern);
    if found.is_empty() {
        found = if pattern.contains(['*', '?', '[']) {
            let invalid = |e: globset::Error| wrong(format!("not a valid glob: {}", e.kind()));
            let glob = Glob::new(pattern).map_err(invalid)?.compile_matcher();
            indices(&|name| glob.is_match(name))
        } else {
            indices(&|name| name.contains(pattern))
        };
    }
    if found.is_empty() {
        return Err(matches_none(field, pattern, linears.iter().map(|linear| &*linear.name)));
    }
    Ok(found)
}

/// torchao's rule (`_auto_filter_for_recipe`): whether a linear is too small to gain from FP8.
/// torchao has no rule for blocks. They use the rule of rows, since they have at least one scale
/// per row.
pub(super) fn is_small(recipe: Recipe, k: usize, n: usize) -> bool {
    match recipe {
        Recipe::Tensorwise | Recipe::Delayed => k <= 4096 && n <= 1024,
        Recipe::Rowwise | Recipe::RowwiseWithGwHp | Recipe::Blockwise | Recipe::Mxfp8 | Recipe::Mxfp8WgradWithHp => {
            n <= 2048 || k <= 1024 || (n <= 4096 && k <= 2048)
        }
    }
}

/// Layer number of each linear, which is the first number in its name, and the number of layers.
///
/// Only the list with the most linears counts: `layers.3.mlp.up_proj` is in layer 3, a linear
/// `heads.0` in no layer.
pub(super) fn layer_numbers(linears: &[LinearInfo]) -> (Vec<Option<usize>>, usize) {
    let place = |name: &str| -> Option<(String, usize)> {
        let parts: Vec<_> = name.split('.').collect();
        let i = parts.iter().position(|part| part.parse::<usize>().is_ok())?;
        Some((parts[..i].join("."), parts[i].parse().ok()?))
    };
    let places: Vec<_> = linears.iter().map(|l| place(&l.name)).collect();
    let members = |list: &str| places.iter().flatten().filter(|(l, _)| l == list).count();
    // Of lists of equal size the first wins; `max_by_key` would take the last.
    let lists = places.iter().flatten().map(|(list, _)| list);
    let largest = lists.fold(None, |best: Option<&String>, list| match best {
        Some(best) if members(best) >= members(list) => Some(best),
        _ => Some(list),
    });
    let numbers: Vec<_> =
        places.iter().map(|p| p.as_ref().filter(|(l, _)| Some(l) == largest).map(|(_, i)| *i)).collect();
    let layers = numbers.iter().flatten().max().map_or(0, |last| last + 1);
    (numbers, layers)
}

/// Error for a pattern under `key` that matches none of these names.
pub(crate) fn matches_none<'a>(
    key: &'static str,
    pattern: &str,
    names: impl ExactSizeIterator<Item = &'a str>,
) -> Float8Error {
    let reason = format!("{pattern:?} matches none of these {} linears: {}", names.len(), shortened(names));
    Float8Error::config(key, "", reason)
}

/// The first eight names, with an ellipsis if there are more.
pub(crate) fn shortened<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    names.take(SHOWN).collect::<Vec<_>>().join(", ") + more
}
