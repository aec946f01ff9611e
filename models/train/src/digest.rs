//! SHA-256 digests in hexadecimal, the fingerprints of everything whose change must be noticed.

use core::fmt::Write;

use sha2::{Digest, Sha256};

/// A digest of fields, each of which goes in with its length, so that no two lists of fields look the same.
#[derive(Default)]
pub(crate) struct Fingerprint(Sha256);

impl Fingerprint {
    pub(crate) fn field(mut self, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub(crate) fn number(self, number: u64) -> Self {
        self.field(number.to_le_bytes())
    }

    pub(crate) fn hex(self) -> String {
        hex(self.0)
    }
}

/// The digest of what `hasher` has been given.
pub(crate) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
