//! Small files of a checkpoint's folder: model configuration, tokenizer files and generation
//! configuration.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use super::base::BASE;
use crate::atomic;

/// Dimensions of the model, and other settings that transformers reads.
pub(super) const CONFIG: &str = "config.json";

/// Generation settings of transformers.
pub(super) const GENERATION: &str = "generation_config.json";

/// Tokenizer files, in either format.
const TOKENIZERS: [&str; 2] = ["tokenizer.json", "tokenizer.model"];

/// Takes precedence over the templates in other files.
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Other files that a checkpoint may have; tokenizers first.
const OTHERS: [&str; 10] = [
    TOKENIZERS[0],
    TOKENIZERS[1],
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
    GENERATION,
];

/// Copies `config.json`, the tokenizer files and `generation_config.json` of a checkpoint's folder
/// `from` into the folder `to`. [`ExportOptions::source`](super::ExportOptions::source) can then be
/// `to` when `from` is gone. Files with these names in `to` are replaced.
///
/// # Errors
/// Files that cannot be read or written.
pub fn copy_assets(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let full = |path: &Path| fs::canonicalize(path).with_context(|| format!("cannot read {}", path.display()));
    if full(from)? == full(to)? {
        return Ok(());
    }
    copy_if_there(from, to, &[CONFIG])?;
    copy_others(from, to)
}

/// Copies a tokenizer, given as a folder or a file, and the files next to it, as in
/// [`copy_assets`]. [`Tokenizer::from_folder`](crate::Tokenizer::from_folder) reads it from the
/// folder `to`.
///
/// # Errors
/// Files that cannot be read or written.
pub fn copy_tokenizer(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    if from.is_dir() {
        return copy_others(from, to);
    }
    let folder = from.parent().unwrap_or(Path::new(""));
    copy_if_there(folder, to, &OTHERS[TOKENIZERS.len()..])?;
    let is_json = from.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    copy_file(from, &to.join(if is_json { TOKENIZERS[0] } else { TOKENIZERS[1] }))
}

/// Copies `config.json` and `generation_config.json` into the folder `to`, without a tokenizer.
///
/// # Errors
/// Files that cannot be read or written.
pub fn copy_config(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    copy_if_there(from.as_ref(), to.as_ref(), &[CONFIG, GENERATION])
}

/// Copies a Jinja file into the folder `to`, as its chat template.
///
/// # Errors
/// Files that cannot be read or written.
pub fn copy_chat_template(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    copy_file(from.as_ref(), &to.as_ref().join(CHAT_TEMPLATE))
}

/// Whether the folder has a tokenizer.
pub(crate) fn has_tokenizer(folder: &Path) -> bool {
    TOKENIZERS.iter().any(|name| folder.join(name).exists())
}

/// Whether a file name belongs to the assets of a run, and may be read.
pub(crate) fn is_asset(name: &str) -> bool {
    [CONFIG, BASE].contains(&name) || OTHERS.contains(&name)
}

/// Same as [`copy_assets`], without `config.json`.
pub(super) fn copy_others(from: &Path, to: &Path) -> Result<()> {
    copy_if_there(from, to, &OTHERS)
}

fn copy_if_there(from: &Path, to: &Path, names: &[&str]) -> Result<()> {
    let mut there = names.iter().filter(|name| from.join(name).exists());
    there.try_for_each(|name| copy_file(&from.join(name), &to.join(name)))
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let mut reader = crate::files::open(from).with_context(|| format!("cannot read {}", from.display()))?;
    // Copies only contents: the files of Hugging Face's cache are read-only.
    let mut copy = || {
        let mut file = atomic::create(to)?;
        io::copy(&mut reader, &mut file)?;
        atomic::finish(file, to)
    };
    copy().with_context(|| format!("cannot write {}", to.display()))
}
