//! The small files of a checkpoint's folder: its config, its tokenizer's, and what it generates with.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::Error;

/// The model's dimensions and more that transformers knows of it.
pub(super) const CONFIG: &str = "config.json";

/// The rest: a checkpoint has some of them.
const OTHERS: [&str; 10] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

/// Copies what a checkpoint's folder `from` has besides weights, `config.json`, the tokenizer's files and
/// `generation_config.json`, into the folder `to`, so that [`ExportOptions::source`](super::ExportOptions::source) can be
/// `to` when `from` is gone. Files of these names in `to` are replaced; synced when this returns.
///
/// # Errors
/// [`Error::Io`] if `from` cannot be read, [`Error::Write`].
pub fn copy_assets(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), Error> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let full = |path: &Path| fs::canonicalize(path).map_err(|source| Error::Io { path: path.into(), source });
    // Onto itself, a file would be emptied first.
    if full(from)? == full(to)? {
        return Ok(());
    }
    copy_if_there(from, to, CONFIG)?;
    copy_others(from, to)
}

/// [`copy_assets`] without `config.json`.
pub(super) fn copy_others(from: &Path, to: &Path) -> Result<(), Error> {
    OTHERS.iter().try_for_each(|name| copy_if_there(from, to, name))
}

fn copy_if_there(from: &Path, to: &Path, name: &str) -> Result<(), Error> {
    let (from, to) = (from.join(name), to.join(name));
    let mut reader = match File::open(&from) {
        Ok(reader) => reader,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(Error::Io { path: from, source }),
    };
    // Contents only: the files of Hugging Face's cache are read-only.
    let copied = File::create(&to).and_then(|mut writer| {
        io::copy(&mut reader, &mut writer)?;
        writer.sync_all()
    });
    copied.map_err(|source| Error::Write { path: to, source })
}
