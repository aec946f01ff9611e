//! [`FileState`]: a file when it was looked at, and what is taken of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Format;

/// Larger token files are known by samples: they are read where they are, and a start must not take the time to read all of one.
pub(super) const MAX_HASHED: u64 = 64 << 20;

/// What a file was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// As it was found.
    #[serde(with = "crate::files::any_path")]
    pub path: PathBuf,
    /// How it is read.
    pub format: Format,
    /// Its size.
    pub bytes: u64,
    /// How many of them are taken, from the beginning; of a Parquet file, bytes of its text.
    pub taken: u64,
    /// When it was last changed, in nanoseconds since 1970.
    pub modified: u64,
    /// SHA-256 of the bytes that are taken. Of a token file of more than 64 MiB, that of samples; there, `modified` must be the same
    /// too.
    pub sha256: String,
}

impl FileState {
    fn is_sampled(&self) -> bool {
        self.format == Format::Bin && self.bytes > MAX_HASHED
    }

    /// Why `now` does not give what the file then gave, if it does not.
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
