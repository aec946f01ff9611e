//! [`FileState`]: state of a file when it was scanned, and how much of it is taken.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Format;

/// Token files above this size are compared by samples. They are read in place, and a start must
/// not take the time to read a whole file.
pub(super) const MAX_HASHED: u64 = 64 << 20;

/// State of a file when it was scanned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Path under which the file was found.
    #[serde(with = "crate::files::any_path")]
    pub path: PathBuf,
    /// Format in which it is read.
    pub format: Format,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes taken from the beginning; for a Parquet file, bytes of its text.
    pub taken: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified: u64,
    /// SHA-256 of the bytes taken; for a Parquet or token file, of the whole file. Token files
    /// above 64 MiB are sampled, and `modified` must match too.
    pub sha256: String,
}

impl FileState {
    fn is_sampled(&self) -> bool {
        self.format == Format::Bin && self.bytes > MAX_HASHED
    }

    /// Why `now` does not give the same data, if it does not.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        let Self { bytes, taken, modified, sha256, .. } = self;
        if *bytes != now.bytes {
            Some(format!("it had {bytes} bytes, now it has {}", now.bytes))
        } else if taken != &now.taken && self.format == Format::Parquet {
            Some(format!("{taken} bytes of its text were read, now {}: set max_bytes as it was", now.taken))
        } else if *taken != now.taken {
            Some(format!("{taken} of its bytes were taken, now {}: set max_bytes as it was", now.taken))
        } else if *sha256 != now.sha256 {
            Some("it has the same size but other content".into())
        } else if self.is_sampled() && *modified != now.modified {
            let [then, now] = [*modified, now.modified].map(seconds);
            Some(format!(
                "its last change was at {then}, now it is at {now} (seconds since 1970), and it is too large to compare all of it; if \
                 you know that it is the same, set the time back with `touch -d @{then}`"
            ))
        } else {
            None
        }
    }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}
