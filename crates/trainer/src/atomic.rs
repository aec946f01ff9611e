//! Atomic writes of files and folders: after a crash or on a full disk they are complete or absent.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use tempfile::{Builder, NamedTempFile};

use crate::files;

/// Suffix of unfinished files and folders. Their names begin with a point.
pub(crate) const PARTIAL: &str = ".partial";

/// Creates a file with a hidden random name next to `path`, which [`finish`] renames. A link, pipe
/// or device at `path` is an error.
pub(crate) fn create(path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_string_lossy();
    if let Ok(there) = path.symlink_metadata() {
        files::check(there.file_type())?;
    }
    let prefix = format!(".{name}.");
    let mut builder = Builder::new();
    builder.prefix(&prefix).suffix(PARTIAL);
    #[cfg(unix)]
    {
        // Uses the usual permissions; a temporary file is readable only by its user.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(parent(path))
}

/// Syncs a file and renames it to `path`.
pub(crate) fn finish(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    sync_names(parent(path))
}

/// Writes `bytes` to `path` atomically: a reader sees all of them or the previous file, also after
/// a crash.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create(path)?;
    file.write_all(bytes)?;
    finish(file, path)
}

/// Checks that a file can be written to `path`.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    create(path).map(drop)
}

/// Writes pretty JSON to `path` atomically.
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    replace(path, &text)
}

/// Syncs a folder with its contents and renames it to `path`. `partial` is on the same file system.
pub(crate) fn publish(partial: &Path, path: &Path) -> io::Result<()> {
    sync_all(partial)?;
    fs::rename(partial, path)?;
    sync_names(parent(path))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_all(path: &Path) -> io::Result<()> {
    if !path.symlink_metadata()?.is_dir() {
        return files::open(path)?.sync_all();
    }
    fs::read_dir(path)?.try_for_each(|entry| sync_all(&entry?.path()))?;
    sync_names(path)
}

/// Syncs the names in a folder. Only Unix can open folders.
fn sync_names(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_not_on_disk_gets_no_name() {
        let temporary = tempfile::tempdir().unwrap();
        let (path, partial) = (temporary.path().join("folder"), temporary.path().join("partial"));
        fs::create_dir_all(partial.join("below")).unwrap();
        fs::write(partial.join("file"), "whole").unwrap();
        symlink("/dev/null", partial.join("below/device")).unwrap();
        publish(&partial, &path).unwrap_err();
        assert!(partial.exists() && !path.exists());
        fs::remove_file(partial.join("below/device")).unwrap();
        publish(&partial, &path).unwrap();
        assert!(!partial.exists() && path.join("below").exists());
        assert_eq!(sync_names(Path::new("/proc")).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// Other kinds of files are refused for writing and appending, and no open blocks.
    #[test]
    fn only_files_are_written() {
        let temporary = tempfile::tempdir().unwrap();
        let [file, link, dangling, pipe, device] =
            ["file", "link", "dangling", "pipe", "device"].map(|name| temporary.path().join(name));
        replace(&file, b"before").unwrap();
        replace(&file, b"after").unwrap();
        symlink(&file, &link).unwrap();
        symlink(temporary.path().join("absent"), &dangling).unwrap();
        symlink("/dev/zero", &device).unwrap();
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for (path, why) in [(&link, "a link"), (&dangling, "a link"), (&pipe, "a pipe"), (&device, "a link")] {
            let errors = [replace(path, b"more"), files::append(path).map(drop)].map(Result::unwrap_err);
            assert!(errors.iter().all(|error| error.to_string().contains(why)), "{errors:?}");
        }
        for path in [&pipe, &device] {
            assert!(files::open(path).unwrap_err().to_string().contains("a device, not a file"));
        }
        assert_eq!(fs::read(&file).unwrap(), b"after");
        File::create(&file).unwrap().set_len(1 << 40).unwrap();
        assert!(files::read(&file).unwrap_err().to_string().contains("1099511627776 bytes"));
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 5, "nothing is left beside them");
    }
}
