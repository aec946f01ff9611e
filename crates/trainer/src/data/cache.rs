//! Cache folders with tokens, named by fingerprints. A folder is complete or missing: one process
//! builds it while others wait. [`KeptTokens`] lists and prunes them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::tokenize::TOKENS;
use super::{cannot_read, cannot_write};
use crate::digest;
use crate::file_lock::FileLock;
use crate::folder::{create_folder, lock_of_left};
use crate::{atomic, files};

/// Written last. A folder without it is incomplete.
const MANIFEST: &str = "manifest.json";

/// Tokens up to this size are compared completely whenever they are opened, more of them by samples.
/// A start must not take the time to read all of them.
const MAX_HASHED: u64 = 1 << 30;

/// Manifest of a cache folder.
#[derive(Serialize, Deserialize)]
struct CacheManifest {
    /// Data that it was made from, as listed by `cache`.
    of: String,
    /// SHA-256 of the tokens, or of samples of them.
    sha256: String,
}

/// Finds the folder `name` of `cache`, made from the data `of`, and whether it existed. If it is
/// missing or has changed, `build` makes it.
pub(super) fn entry(
    cache: &Path,
    name: &str,
    of: String,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<(PathBuf, bool)> {
    let folder = cache.join(name);
    if is_whole(&folder) {
        return Ok((folder, true));
    }
    let lock_path = cache.join(format!("{name}.lock"));
    let _lock = FileLock::wait(&lock_path).with_context(cannot_write(&lock_path))?;
    if is_whole(&folder) {
        return Ok((folder, true));
    }
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).with_context(cannot_write(&folder)),
        _ => {}
    }
    create_folder(&folder, |partial| {
        build(partial)?;
        let sha256 =
            digest::of_file_or_samples(&partial.join(TOKENS), MAX_HASHED).with_context(cannot_write(partial))?;
        let path = partial.join(MANIFEST);
        atomic::replace_json(&path, &CacheManifest { of, sha256 }).with_context(cannot_write(&path))
    })?;
    Ok((folder, false))
}

fn manifest(folder: &Path) -> Option<CacheManifest> {
    serde_json::from_slice(&files::read(&folder.join(MANIFEST)).ok()?).ok()
}

/// Whether a folder has its tokens. If so, notes the use as the manifest's modification time.
fn is_whole(folder: &Path) -> bool {
    let sha256 = manifest(folder).map(|manifest| manifest.sha256);
    let is_whole = sha256.is_some() && sha256 == digest::of_file_or_samples(&folder.join(TOKENS), MAX_HASHED).ok();
    if is_whole {
        // If that fails, the time stays as it was.
        let manifest = files::open_as(&folder.join(MANIFEST), File::options().append(true), false);
        let _ = manifest.and_then(|file| file.set_modified(SystemTime::now()));
    }
    is_whole
}

/// Folder of the cache, with the tokens of some sources.
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
    /// A folder that cannot be read.
    pub fn list(cache: &Path) -> Result<Vec<Self>> {
        let mut kept = vec![];
        for path in entries(cache)?.into_iter().filter(|path| path.is_dir() && !path.is_symlink()) {
            let is_whole = is_entry(&path);
            let used = match is_whole {
                true => modified(&path.join(MANIFEST)),
                false => lock_of_left(&path).and_then(|_lock| modified(&path)),
            };
            // Other folders are being made, or do not belong to a cache.
            let Some(used) = used else { continue };
            match size(&path) {
                // It has just been renamed or removed.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                bytes => {
                    let bytes = bytes.with_context(cannot_read(&path))?;
                    let of = manifest(&path).map(|manifest| manifest.of).unwrap_or_default();
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
    /// A folder that cannot be read or removed.
    pub fn prune(cache: &Path, unused: Duration) -> Result<Vec<Self>> {
        let now = SystemTime::now();
        let is_old = |used: SystemTime| now.duration_since(used).unwrap_or_default() >= unused;
        let mut pruned = vec![];
        for kept in Self::list(cache)?.into_iter().filter(|kept| is_old(kept.used)) {
            let lock = match kept.is_whole {
                true => FileLock::try_take(&kept.path.with_extension("lock")).with_context(cannot_write(&kept.path))?,
                false => lock_of_left(&kept.path),
            };
            let manifest = kept.path.join(MANIFEST);
            // Being made, or used or rebuilt in the meantime.
            if lock.is_none() || (kept.is_whole && modified(&manifest) != Some(kept.used)) {
                continue;
            }
            // A folder without a manifest is no entry, even if the rest cannot be removed.
            let unnamed = if kept.is_whole { fs::remove_file(manifest) } else { Ok(()) };
            unnamed.and_then(|()| fs::remove_dir_all(&kept.path)).with_context(cannot_write(&kept.path))?;
            pruned.push(kept);
        }
        // Memories of scans. Without them, files are scanned again.
        for path in entries(cache)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.contains(".files.json") && modified(&path).is_some_and(is_old) {
                fs::remove_file(&path).with_context(cannot_write(&path))?;
            }
        }
        Ok(pruned)
    }
}

fn entries(cache: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(cache) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.with_context(cannot_read(cache))?,
    };
    entries.map(|entry| Ok(entry.with_context(cannot_read(cache))?.path())).collect()
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
