//! Folders of a cache: made whole or not at all, by one process while others wait, and known by a fingerprint.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::DataError;
use super::error::cannot_write;

/// Written last: a folder without it is not whole.
const MANIFEST: &str = "manifest.json";

/// A folder of the cache.
pub(super) struct Entry<M> {
    pub(super) folder: PathBuf,
    pub(super) manifest: M,
    /// It was there before.
    pub(super) was_cached: bool,
}

/// The folder `name` of `cache`, made by `build` unless it is there and `is_whole`.
pub(super) fn entry<M: Serialize + DeserializeOwned>(
    cache: &Path,
    name: &str,
    is_whole: impl Fn(&Path, &M) -> bool,
    build: impl FnOnce(&Path) -> Result<M, DataError>,
) -> Result<Entry<M>, DataError> {
    let folder = cache.join(name);
    let open = || {
        let manifest: M = serde_json::from_slice(&fs::read(folder.join(MANIFEST)).ok()?).ok()?;
        is_whole(&folder, &manifest).then(|| Entry { folder: folder.clone(), manifest, was_cached: true })
    };
    if let Some(entry) = open() {
        return Ok(entry);
    }
    fs::create_dir_all(cache).map_err(cannot_write(cache))?;
    let lock_path = cache.join(format!("{name}.lock"));
    let lock = OpenOptions::new().create(true).write(true).truncate(false).open(&lock_path);
    let lock = lock.map_err(cannot_write(&lock_path))?;
    // The system lets go of it when the process ends, however it ends.
    lock.lock().map_err(cannot_write(&lock_path))?;
    if let Some(entry) = open() {
        return Ok(entry);
    }
    let partial = cache.join(format!("{name}.partial"));
    remove(&partial)?;
    fs::create_dir(&partial).map_err(cannot_write(&partial))?;
    let built = build(&partial).and_then(|manifest| {
        let path = partial.join(MANIFEST);
        write_manifest(&path, &manifest).map_err(cannot_write(&path))?;
        remove(&folder)?;
        fs::rename(&partial, &folder).map_err(cannot_write(&folder))?;
        Ok(manifest)
    });
    match built {
        Ok(manifest) => Ok(Entry { folder, manifest, was_cached: false }),
        Err(error) => {
            remove(&partial)?;
            Err(error)
        }
    }
}

fn write_manifest(path: &Path, manifest: &impl Serialize) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    serde_json::to_writer_pretty(&mut file, manifest)?;
    file.flush()?;
    file.sync_all()
}

fn remove(folder: &Path) -> Result<(), DataError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(cannot_write(folder)(error)),
        _ => Ok(()),
    }
}

/// Whether the file is there and has this size.
pub(super) fn has_size(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.len() == bytes)
}
