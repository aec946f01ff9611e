//! Cache folders, named by fingerprints. A folder is complete or missing: one process builds it
//! while others wait.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::DataError;
use super::error::cannot_write;
use crate::atomic;
use crate::digest;
use crate::file_lock::FileLock;
use crate::files;
use crate::folder::create_folder;

/// Written last. A folder without it is incomplete.
pub(super) const MANIFEST: &str = "manifest.json";

/// Files up to this size are compared completely whenever they are opened, larger ones by samples.
/// A start must not take the time to read all of them.
const MAX_HASHED: u64 = 1 << 30;

/// Manifest of a cache folder.
#[derive(Serialize, Deserialize)]
pub(super) struct Manifest<M> {
    content: M,
    /// Data that it was made from, as listed by `cache`.
    pub(super) of: String,
    /// SHA-256 of each file, or of samples of it.
    sha256: BTreeMap<String, String>,
}

/// Folder of the cache.
pub(super) struct Entry<M> {
    pub(super) folder: PathBuf,
    pub(super) manifest: M,
    /// Whether it existed before.
    pub(super) was_cached: bool,
}

/// Opens the folder `name` of `cache`, made from the data `of`. If it is missing or has changed,
/// `build` makes it.
pub(super) fn entry<M: Serialize + DeserializeOwned>(
    cache: &Path,
    name: &str,
    of: &str,
    build: impl FnOnce(&Path) -> Result<M, DataError>,
) -> Result<Entry<M>, DataError> {
    let folder = cache.join(name);
    let open = || {
        let manifest: Manifest<M> = serde_json::from_slice(&files::read(&folder.join(MANIFEST)).ok()?).ok()?;
        digests(&folder).is_ok_and(|now| now == manifest.sha256).then(|| {
            note_use(&folder);
            Entry { folder: folder.clone(), manifest: manifest.content, was_cached: true }
        })
    };
    if let Some(entry) = open() {
        return Ok(entry);
    }
    fs::create_dir_all(cache).map_err(cannot_write(cache))?;
    let lock_path = cache.join(format!("{name}.lock"));
    let _lock = FileLock::wait(&lock_path).map_err(cannot_write(&lock_path))?;
    if let Some(entry) = open() {
        return Ok(entry);
    }
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(cannot_write(&folder)(error)),
        _ => {}
    }
    let manifest = create_folder(&folder, |partial| {
        let (content, path) = (build(partial)?, partial.join(MANIFEST));
        let manifest = Manifest { content, of: of.into(), sha256: digests(partial).map_err(cannot_write(partial))? };
        atomic::replace_json(&path, &manifest).map_err(cannot_write(&path))?;
        Ok::<_, DataError>(manifest.content)
    })?;
    Ok(Entry { folder, manifest, was_cached: false })
}

/// Sets the manifest's modification time, which records the last use. If that fails, the time stays
/// as it was.
fn note_use(folder: &Path) {
    let manifest = files::open_as(&folder.join(MANIFEST), File::options().append(true), false);
    let _ = manifest.and_then(|file| file.set_modified(SystemTime::now()));
}

/// Digests of all files except the manifest.
fn digests(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut digests = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != MANIFEST {
            digests.insert(name, digest(&entry.path())?);
        }
    }
    Ok(digests)
}

fn digest(path: &Path) -> io::Result<String> {
    match fs::metadata(path)?.len() {
        bytes if bytes > MAX_HASHED => digest::of_samples(path),
        _ => digest::of_file(path).map(|(_, digest)| digest),
    }
}
