//! [`KeptTokens`]: what a cache of tokens holds, so that somebody can look at it and remove what is not used.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::DataError;
use super::cache::MANIFEST;
use super::error::{cannot_read, cannot_write};
use crate::file_lock::FileLock;

/// A folder of the cache: tokens of some sources, or an index of their documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptTokens {
    /// The folder.
    pub path: PathBuf,
    /// The data it was made of, where that lay then; empty if an earlier version has made it.
    pub of: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
}

impl KeptTokens {
    /// What is in the cache, the most recently used first. A cache that is not there is empty.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn list(cache: &Path) -> Result<Vec<Self>, DataError> {
        let mut kept = vec![];
        for path in entries(cache)? {
            // Others are being made, or are no folders of a cache.
            if let Some(used) = modified(&path.join(MANIFEST)) {
                let manifest = fs::read(path.join(MANIFEST)).unwrap_or_default();
                let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
                let of = manifest["of"].as_str().unwrap_or_default().into();
                kept.push(Self { bytes: size(&path).map_err(cannot_read(&path))?, path, of, used });
            }
        }
        kept.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.path.cmp(&b.path)));
        Ok(kept)
    }

    /// Removes what has not been used for this long, and gives what that was. A run that reads it meanwhile goes on; what a process is
    /// making stays.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Cache`].
    pub fn prune(cache: &Path, unused: Duration) -> Result<Vec<Self>, DataError> {
        let now = SystemTime::now();
        let is_old = |used: SystemTime| now.duration_since(used).unwrap_or_default() >= unused;
        let mut pruned = vec![];
        for kept in Self::list(cache)?.into_iter().filter(|kept| is_old(kept.used)) {
            let lock_path = kept.path.with_added_extension("lock");
            let Some(_lock) = FileLock::try_take(&lock_path).map_err(cannot_write(&lock_path))? else {
                continue;
            };
            // Without a manifest it is no entry, also if the rest cannot be removed.
            let removed = fs::remove_file(kept.path.join(MANIFEST)).and_then(|()| fs::remove_dir_all(&kept.path));
            removed.map_err(cannot_write(&kept.path))?;
            pruned.push(kept);
        }
        // Memories of looks at files; without them files are read again.
        for path in entries(cache)? {
            let is_memory = path.as_os_str().as_encoded_bytes().ends_with(b".files.json");
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

fn size(folder: &Path) -> io::Result<u64> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}
