//! Files that are there as a whole or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::folder::{sync_folder, write_synced};

/// Writes `bytes` to `path`: whoever reads it finds all of them, or what was there before, also after a crash.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = beside(path);
    let written = || -> io::Result<()> {
        write_synced(&beside, bytes)?;
        fs::rename(&beside, path)?;
        sync_folder(path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
    };
    written().inspect_err(|_| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&beside);
    })
}

/// What Git has where a large file was not fetched.
pub(crate) const LFS_POINTER: &str = "it is a Git LFS pointer, not the file: `git lfs pull` fetches that";

/// Whether a file that begins with these bytes stands for one that Git LFS has.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/")
}

/// Refuses a path that no file can be written to.
pub(crate) fn check_destination(path: &Path) -> io::Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let beside = beside(path);
    File::create(&beside).and_then(|_| fs::remove_file(&beside))
}

/// A hidden name in the same folder, so on the same file system.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.partial", std::process::id()))
}
