//! Atomic creation of folders: complete or absent.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use tempfile::{Builder, TempDir};

use crate::atomic::{self, PARTIAL};
use crate::file_lock::FileLock;

/// Names in a hidden folder: the lock file of its process, and the folder being filled.
const LOCK: &str = "LOCK";
const NEW: &str = "new";

/// Creates the folder `path` and its parents, with the contents written by `fill`. `path` must not
/// exist, or be an empty folder.
///
/// `fill` writes into a hidden folder next to `path`. Its files are synced, and the folder is
/// renamed to `path`. If `fill` fails, nothing is left. If the process is killed, the hidden folder
/// stays until `path` is created again or `cache` removes it.
///
/// # Errors
/// The errors of `fill`; `path` is occupied or cannot be written.
pub fn create_folder<T, E: From<anyhow::Error>>(path: &Path, fill: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    let cannot = || format!("cannot make the folder {}", path.display());
    let name = path.display();
    let occupied = || anyhow!("{name} exists and is not an empty folder: give one that does not exist");
    let destination = destination(path).with_context(cannot)?.ok_or_else(occupied)?;
    let (hidden, _lock) = hidden_beside(&destination).with_context(cannot)?;
    let new = hidden.path().join(NEW);
    fs::create_dir(&new).with_context(cannot)?;
    let filled = fill(&new)?;
    match atomic::publish(&new, &destination) {
        Ok(()) => Ok(filled),
        // Another process was faster.
        Err(error) if is_occupied(error.kind()) => Err(occupied().into()),
        Err(error) => Err(anyhow::Error::new(error).context(cannot()).into()),
    }
}

fn is_occupied(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory)
}

/// Takes the lock of a hidden folder left by a killed process; `None` for anything else.
pub(crate) fn lock_of_left(path: &Path) -> Option<FileLock> {
    let (name, lock) = (path.file_name()?.as_encoded_bytes(), path.join(LOCK));
    let is_hidden = name.starts_with(b".") && name.ends_with(PARTIAL.as_bytes()) && lock.exists();
    let is_ours = |entry: fs::DirEntry| [LOCK, NEW].iter().any(|name| entry.file_name() == *name);
    let is_left = is_hidden && fs::read_dir(path).ok()?.flatten().all(is_ours);
    is_left.then(|| FileLock::try_take(&lock).ok()?).flatten()
}

/// Absolute path to rename to, with links resolved. `None` if it is occupied.
fn destination(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
        Ok(true) => fs::canonicalize(path).map(Some),
        Ok(false) => Ok(None),
        // A file, or a dangling link. A file as parent is reported by the system.
        Err(_) if path.symlink_metadata().is_ok_and(|there| !there.is_dir()) => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::NotADirectory | ErrorKind::NotFound) => {
            std::path::absolute(path).map(Some)
        }
        Err(error) => Err(error),
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
    let is_alike = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes());
    for left in fs::read_dir(parent)?.flatten().filter(is_alike) {
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
