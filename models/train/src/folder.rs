//! Atomic creation of folders: complete or absent.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tempfile::{Builder, TempDir};

use crate::atomic::{self, PARTIAL};
use crate::file_lock::FileLock;

/// Names in a hidden folder: the lock file of its process, and the folder being filled.
const LOCK: &str = "LOCK";
const NEW: &str = "new";

/// Why a folder was not created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The path exists and is not an empty folder.
    #[error("{} exists and is not an empty folder: give one that does not exist", path.display())]
    Occupied {
        /// The given path.
        path: PathBuf,
    },
    /// The folder could not be created.
    #[error("cannot make the folder {}", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Creates the folder `path` and its parents, with the contents written by `fill`. `path` must not
/// exist, or be an empty folder.
///
/// `fill` writes into a hidden folder next to `path`. Its files are synced, and the folder is
/// renamed to `path`. If `fill` fails, nothing is left. If the process is killed, the hidden folder
/// stays until `path` is created again or `cache` removes it.
///
/// # Errors
/// The errors of `fill`; [`FolderError`].
pub fn create_folder<T, E: From<FolderError>>(path: &Path, fill: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    let failed = |source| FolderError::Io { path: path.into(), source };
    let destination = destination(path)?;
    let (hidden, _lock) = hidden_beside(&destination).map_err(failed)?;
    let new = hidden.path().join(NEW);
    fs::create_dir(&new).map_err(failed)?;
    let filled = fill(&new)?;
    atomic::publish(&new, &destination).map_err(|source| match source.kind() {
        // Another process was faster.
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            FolderError::Occupied { path: path.into() }
        }
        _ => FolderError::Io { path: path.into(), source },
    })?;
    Ok(filled)
}

/// Takes the lock of a hidden folder left by a killed process; `None` for anything else.
pub(crate) fn lock_of_left(path: &Path) -> Option<FileLock> {
    let (name, lock) = (path.file_name()?.as_encoded_bytes(), path.join(LOCK));
    let is_hidden = name.starts_with(b".") && name.ends_with(PARTIAL.as_bytes()) && lock.exists();
    let is_ours = |entry: fs::DirEntry| [LOCK, NEW].iter().any(|name| entry.file_name() == *name);
    let is_left = is_hidden && fs::read_dir(path).ok()?.flatten().all(is_ours);
    is_left.then(|| FileLock::try_take(&lock).ok()?).flatten()
}

/// Absolute path to rename to, with links resolved.
fn destination(path: &Path) -> Result<PathBuf, FolderError> {
    let occupied = || FolderError::Occupied { path: path.into() };
    let failed = |source| FolderError::Io { path: path.into(), source };
    let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
    match fs::read_dir(path).map(is_empty) {
        Ok(true) => fs::canonicalize(path).map_err(failed),
        Ok(false) => Err(occupied()),
        Err(error) if matches!(error.kind(), ErrorKind::NotADirectory | ErrorKind::NotFound) => {
            // A file, or a dangling link. A file as parent is reported by the system.
            if path.symlink_metadata().is_ok() {
                return Err(occupied());
            }
            std::path::absolute(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}

/// Creates a hidden folder in the same folder, so on the same file system. Removes leftovers for
/// the same destination.
fn hidden_beside(destination: &Path) -> io::Result<(TempDir, FileLock)> {
    let (Some(parent), Some(name)) = (destination.parent(), destination.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(parent)?;
    let prefix = format!(".{}.", name.to_string_lossy());
    let is_alike = |name: &OsStr| name.as_encoded_bytes().starts_with(prefix.as_bytes());
    for left in fs::read_dir(parent)?.flatten().filter(|entry| is_alike(&entry.file_name())) {
        if let Some(_lock) = lock_of_left(&left.path()) {
            // A leftover that cannot be removed does no harm.
            let _ = fs::remove_dir_all(left.path());
        }
    }
    let hidden = Builder::new().prefix(&prefix).suffix(PARTIAL).tempdir_in(parent)?;
    // Locks the file before it gets its name.
    let unnamed = hidden.path().join(".LOCK");
    let lock = FileLock::wait(&unnamed)?;
    fs::rename(unnamed, hidden.path().join(LOCK))?;
    Ok((hidden, lock))
}
