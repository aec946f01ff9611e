//! Files that are read, and are files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Opens a file for reading. A pipe or a device, of which a reader might wait for ever, is an error.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    let error = if kind.is_dir() { io::ErrorKind::IsADirectory.into() } else { io::Error::other(NotAFile) };
    Err(error)
}

/// All bytes of what [`open`] opens.
///
/// # Errors
/// The system's.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of what [`open`] opens.
///
/// # Errors
/// The system's; bytes that are no UTF-8; a file that Git LFS has in its place.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let text = io::read_to_string(open(path)?)?;
    if is_lfs_pointer(text.as_bytes()) { Err(io::Error::other(LFS_POINTER)) } else { Ok(text) }
}

/// What was to be read as a file is something else.
#[derive(Debug, thiserror::Error)]
#[error("it is a pipe, a socket or a device, not a file")]
struct NotAFile;

/// What Git has where a large file was not fetched.
pub(crate) const LFS_POINTER: &str = "it is a Git LFS pointer, not the file: `git lfs pull` fetches that";

/// Whether a file that begins with these bytes stands for one that Git LFS has.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/")
}

/// Paths in JSON, with `#[serde(with)]`: text, and bytes where a name is no UTF-8.
pub(crate) mod any_path {
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum AnyPath {
        Text(String),
        Bytes(Vec<u8>),
    }

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |text: &str| AnyPath::Text(text.into());
        path.to_str()
            .map_or_else(|| AnyPath::Bytes(path.as_os_str().as_encoded_bytes().to_vec()), text)
            .serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Ok(match AnyPath::deserialize(deserializer)? {
            AnyPath::Text(text) => text.into(),
            AnyPath::Bytes(bytes) => from_bytes(bytes),
        })
    }

    #[cfg(unix)]
    fn from_bytes(bytes: Vec<u8>) -> PathBuf {
        use std::os::unix::ffi::OsStringExt;
        std::ffi::OsString::from_vec(bytes).into()
    }

    /// Names are compared, not opened.
    #[cfg(not(unix))]
    fn from_bytes(bytes: Vec<u8>) -> PathBuf {
        String::from_utf8_lossy(&bytes).into_owned().into()
    }
}
