//! Files and folders that are there whole or not at all, whatever ends the process or the disk while they are written.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Writes `bytes` to `path`: whoever reads it finds all of them, or what was there before, also after a crash.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let partial = beside(path);
    fs::write(&partial, bytes).and_then(|()| publish(&partial, path)).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&partial);
    })
}

/// Gives a file or a folder its name, once it is on disk with all that is in it. `partial` is on the same file system as `path`.
pub(crate) fn publish(partial: &Path, path: &Path) -> io::Result<()> {
    sync_all(partial)?;
    fs::rename(partial, path)?;
    // Names are the folder's.
    sync(path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// Refuses a path that no file can be written to.
pub(crate) fn check_destination(path: &Path) -> io::Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let partial = beside(path);
    File::create(&partial).and_then(|_| fs::remove_file(&partial))
}

/// A hidden name in the same folder.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.partial", std::process::id()))
}

fn sync_all(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        fs::read_dir(path)?.try_for_each(|entry| sync_all(&entry?.path()))?;
    }
    sync(path)
}

/// Waits until a file or a folder's names are on disk; only Unix opens folders.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    if cfg!(unix) || !path.is_dir() { File::open(path)?.sync_all() } else { Ok(()) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Linux refuses to sync a device, which shows that it was asked to.
    #[test]
    fn what_is_not_on_disk_gets_no_name() {
        let temporary = tempfile::tempdir().unwrap();
        let (path, partial) = (temporary.path().join("folder"), temporary.path().join("partial"));
        fs::create_dir_all(partial.join("below")).unwrap();
        fs::write(partial.join("file"), "whole").unwrap();
        symlink("/dev/null", partial.join("below/device")).unwrap();
        assert_eq!(publish(&partial, &path).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(partial.exists() && !path.exists());
        fs::remove_file(partial.join("below/device")).unwrap();
        publish(&partial, &path).unwrap();
        assert!(!partial.exists() && path.join("below").exists());
        assert_eq!(sync(Path::new("/proc")).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_file_that_cannot_be_synced_replaces_none() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("file");
        replace(&path, b"before").unwrap();
        symlink("/dev/null", beside(&path)).unwrap();
        assert_eq!(replace(&path, b"after").unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1, "nothing is left beside it");
        replace(&path, b"after").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"after");
    }
}
