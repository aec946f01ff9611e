//! [`KeptTokens`]: lists and prunes the token cache.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::de::IgnoredAny;

use super::DataError;
use super::cache::{MANIFEST, Manifest};
use super::error::{cannot_read, cannot_write};
use crate::file_lock::FileLock;
use crate::files;
use crate::folder::lock_of_left;

/// Folder of the cache: tokens of some sources, or an index of their documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptTokens {
    /// Path of the folder.
    pub path: PathBuf,
    /// Data that it was made from, with its path at that time.
    pub of: String,
    /// Size of its files in bytes.
    pub bytes: u64,
    /// Time of the last use; for an incomplete folder, of its last change.
    pub used: SystemTime,
    /// Whether it is complete. Killed processes leave incomplete folders.
    pub is_whole: bool,
}

impl KeptTokens {
    /// Lists the entries of a cache and the folders that killed processes left, most recently used
    /// first. `tokenize` and `export` leave such folders too. A missing cache is empty.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn list(cache: &Path) -> Result<Vec<Self>, DataError> {
        let mut kept = vec![];
        for path in entries(cache)?.into_iter().filter(|path| path.is_dir() && !path.is_symlink()) {
            let is_whole = path.extension().is_none_or(|extension| extension != "partial");
            let used = match is_whole {
                true if is_entry(&path) => modified(&path.join(MANIFEST)),
                true => None,
                false => lock(&path).ok().flatten().and_then(|_lock| modified(&path)),
            };
            // Other folders are being made, or do not belong to a cache.
            let Some(used) = used else { continue };
            match size(&path) {
                // It has just been renamed or removed.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                bytes => {
                    let bytes = bytes.map_err(cannot_read(&path))?;
                    let manifest = files::read(&path.join(MANIFEST)).unwrap_or_default();
                    let manifest = serde_json::from_slice::<Manifest<IgnoredAny>>(&manifest);
                    let of = manifest.map(|manifest| manifest.of).unwrap_or_default();
                    kept.push(Self { path, of, bytes, used, is_whole });
                }
            }
        }
        kept.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.path.cmp(&b.path)));
        Ok(kept)
    }

    /// Removes entries that were not used for `unused` and returns them. A run that is reading a
    /// removed entry continues. Entries that are being made stay.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Cache`].
    pub fn prune(cache: &Path, unused: Duration) -> Result<Vec<Self>, DataError> {
        let now = SystemTime::now();
        let is_old = |used: SystemTime| now.duration_since(used).unwrap_or_default() >= unused;
        let mut pruned = vec![];
        for kept in Self::list(cache)?.into_iter().filter(|kept| is_old(kept.used)) {
            let Some(_lock) = lock(&kept.path).map_err(cannot_write(&kept.path))? else { continue };
            let manifest = kept.path.join(MANIFEST);
            // Used or rebuilt in the meantime.
            if kept.is_whole && modified(&manifest) != Some(kept.used) {
                continue;
            }
            // A folder without a manifest is no entry, even if the rest cannot be removed.
            let unnamed = if kept.is_whole { fs::remove_file(manifest) } else { Ok(()) };
            unnamed.and_then(|()| fs::remove_dir_all(&kept.path)).map_err(cannot_write(&kept.path))?;
            pruned.push(kept);
        }
        // Scanner memories. Without them, files are scanned again.
        for path in entries(cache)? {
            let is_memory = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".files.json"));
            if is_memory && modified(&path).is_some_and(is_old) {
                fs::remove_file(&path).map_err(cannot_write(&path))?;
            }
        }
        Ok(pruned)
    }
}

fn entries(cache: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = match fs::read_dir(cache) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.map_err(cannot_read(cache))?,
    };
    entries.map(|entry| Ok(entry.map_err(cannot_read(cache))?.path())).collect()
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn size(path: &Path) -> io::Result<u64> {
    match path.symlink_metadata()? {
        folder if folder.is_dir() => fs::read_dir(path)?.map(|entry| size(&entry?.path())).sum(),
        file => Ok(file.len()),
    }
}

/// Whether the name of a folder begins with a fingerprint.
fn is_entry(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.get(..64).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
}

/// Takes the lock of a folder; `None` while a process makes it. Earlier versions named the folder
/// `FINGERPRINT.partial`.
fn lock(path: &Path) -> io::Result<Option<FileLock>> {
    if is_entry(path) { FileLock::try_take(&path.with_extension("lock")) } else { Ok(lock_of_left(path)) }
}
