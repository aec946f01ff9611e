//! New folders, which are there whole or not at all.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tempfile::{Builder, TempDir};

use crate::atomic;

/// Why a folder was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// There is something that would be lost.
    #[error("{} exists and is not an empty folder: give one that does not exist", path.display())]
    Occupied {
        /// Where the folder was to be.
        path: PathBuf,
    },
    /// The folder could not be made.
    #[error("cannot make the folder {}", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Makes the folder `path`, and those above it, with what `fill` writes into the folder that it is given. `path` must not
/// exist, or be an empty folder.
///
/// `fill` writes to a hidden folder beside `path`, which then gets its name. If `fill` fails, nothing is left; if the process
/// ends while it runs, the hidden folder is. What `fill` has written is on disk before.
///
/// # Errors
/// The errors of `fill`; [`FolderError`].
pub fn create_folder<E: From<FolderError>>(path: &Path, fill: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
    let destination = destination(path)?;
    let mut hidden = hidden_beside(&destination).map_err(|source| FolderError::Io { path: path.into(), source })?;
    fill(hidden.path())?;
    atomic::publish(hidden.path(), &destination).map_err(|source| match source.kind() {
        // Somebody else was faster.
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            FolderError::Occupied { path: path.into() }
        }
        _ => FolderError::Io { path: path.into(), source },
    })?;
    hidden.disable_cleanup(true);
    Ok(())
}

/// `path` with a last part that can be renamed to, links followed.
fn destination(path: &Path) -> Result<PathBuf, FolderError> {
    let occupied = || FolderError::Occupied { path: path.into() };
    let failed = |source| FolderError::Io { path: path.into(), source };
    let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
    match fs::read_dir(path).map(is_empty) {
        Ok(true) => fs::canonicalize(path).map_err(failed),
        Ok(false) => Err(occupied()),
        Err(error) if matches!(error.kind(), ErrorKind::NotADirectory | ErrorKind::NotFound) => {
            // A file, or a link to nothing; a file above it is the system's error to tell.
            if path.symlink_metadata().is_ok() {
                return Err(occupied());
            }
            std::path::absolute(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}

/// In the same folder, so on the same file system.
fn hidden_beside(destination: &Path) -> io::Result<TempDir> {
    let (Some(parent), Some(name)) = (destination.parent(), destination.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(parent)?;
    let prefix = format!(".{}.", name.to_string_lossy());
    let mut builder = Builder::new();
    builder.prefix(&prefix);
    #[cfg(unix)]
    {
        // As any other folder, where a temporary one is the user's alone.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    builder.tempdir_in(parent)
}
