//! Opens regular files only, without blocking. Reads whole files only up to a limit.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Maximum bytes of a file that is read whole.
const MAX_WHOLE: u64 = 1 << 30;

/// Opens a file for reading. A pipe or a device, which could block a reader forever, is an error.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    open_as(path, File::options().read(true), true)
}

/// Opens a file for reading and appending, and creates it if missing. A link is an error.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    if path.is_symlink() {
        return Err(io::Error::other(LINK));
    }
    open_as(path, File::options().read(true).append(true).create(true), false)
}

/// Opens without blocking even for a pipe or a device, and returns an error for these.
pub(crate) fn open_as(path: &Path, options: &mut OpenOptions, follows_links: bool) -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let links = if follows_links { 0 } else { libc::O_NOFOLLOW };
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | links);
    }
    let file = options.open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// Returns an error unless it is a regular file.
pub(crate) fn check(kind: FileType) -> io::Result<()> {
    match kind {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        kind if kind.is_symlink() => Err(io::Error::other(LINK)),
        _ => Err(io::Error::other(SPECIAL)),
    }
}

/// Reads all bytes of a file opened by [`open`].
///
/// # Errors
/// The system's; a file of more than 1 GiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (file, mut bytes) = (open(path)?, vec![]);
    let found = file.metadata()?.len();
    if found > MAX_WHOLE {
        return Err(io::Error::other(format!("it has {found} bytes: at most {MAX_WHOLE} are read at once")));
    }
    file.take(MAX_WHOLE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the text of a file opened by [`open`].
///
/// # Errors
/// The system's; a file of more than 1 GiB; bytes that are not UTF-8; a Git LFS pointer.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let text = io::read_to_string(&read(path)?[..])?;
    if is_lfs_pointer(text.as_bytes()) { Err(io::Error::other(LFS_POINTER)) } else { Ok(text) }
}

/// Parses a JSON file.
///
/// # Errors
/// The errors of [`read_to_string`]; other JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not valid", path.display()))
}

/// Parses a JSON object; empty if the file is missing.
///
/// # Errors
/// The errors of [`read_json`].
pub(crate) fn read_object(path: &Path) -> anyhow::Result<Map<String, Value>> {
    if path.exists() { read_json(path) } else { Ok(Map::new()) }
}

/// Reasons for not opening a file.
const SPECIAL: &str = "it is a pipe, a socket or a device, not a file";
const LINK: &str = "it is a link, and nothing is written through links";

/// Reason for a Git LFS pointer instead of the file.
pub(crate) const LFS_POINTER: &str = "it is a Git LFS pointer, not the file: `git lfs pull` fetches that";

/// Whether a file that begins with these bytes is a Git LFS pointer.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/")
}

/// Paths in JSON, with `#[serde(with)]`: text, or bytes if a name is not UTF-8.
pub(crate) mod any_path {
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        match path.to_str() {
            Some(text) => text.serialize(serializer),
            None => path.as_os_str().as_encoded_bytes().serialize(serializer),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum AnyPath {
            Text(PathBuf),
            Bytes(Vec<u8>),
        }
        Ok(match AnyPath::deserialize(deserializer)? {
            AnyPath::Text(path) => path,
            AnyPath::Bytes(bytes) => from_bytes(bytes),
        })
    }

    #[cfg(unix)]
    fn from_bytes(bytes: Vec<u8>) -> PathBuf {
        use std::os::unix::ffi::OsStringExt;
        std::ffi::OsString::from_vec(bytes).into()
    }

    /// Lossy, because these names are only compared and not opened.
    #[cfg(not(unix))]
    fn from_bytes(bytes: Vec<u8>) -> PathBuf {
        String::from_utf8_lossy(&bytes).into_owned().into()
    }
}
