//! SHA-256 digests in hexadecimal, used to detect changes.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::files;

/// Bytes of a sample, and number of samples.
const SAMPLE: usize = 1 << 20;
const SAMPLES: u64 = 64;

/// Digest of fields. Each field is hashed with its length, so different lists of fields have
/// different digests.
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

/// Size of a file in bytes, and its digest.
pub(crate) fn of_file(path: &Path) -> io::Result<(u64, String)> {
    struct Hasher(Sha256);
    impl io::Write for Hasher {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hasher = Hasher(Sha256::new());
    let bytes = io::copy(&mut files::open(path)?, &mut hasher)?;
    Ok((bytes, hex(hasher.0)))
}

/// SHA-256 of a file, in hexadecimal.
///
/// # Errors
/// Errors of reading the file.
pub fn digest_of_file(path: &Path) -> io::Result<String> {
    Ok(of_file(path)?.1)
}

/// SHA-256 of a file of up to `max_bytes`, or else its digest by [`of_samples`].
pub(crate) fn of_file_or_samples(path: &Path, max_bytes: u64) -> io::Result<String> {
    if fs::metadata(path)?.len() > max_bytes { of_samples(path) } else { digest_of_file(path) }
}

/// Digest of a file's size and of evenly spaced samples, the last at the end of the file. For files
/// that are too large to read, with at least one sample.
pub(crate) fn of_samples(path: &Path) -> io::Result<String> {
    let mut file = files::open(path)?;
    let bytes = file.metadata()?.len();
    let mut sample = vec![0; SAMPLE];
    let mut fingerprint = Fingerprint::default().number(bytes);
    for i in 0..SAMPLES {
        let begin = u128::from(bytes.saturating_sub(SAMPLE as u64)) * u128::from(i) / u128::from(SAMPLES - 1);
        file.seek(SeekFrom::Start(begin as u64))?;
        file.read_exact(&mut sample)?;
        fingerprint = fingerprint.field(&sample);
    }
    Ok(fingerprint.hex())
}

/// Digest of the hashed bytes.
pub(crate) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
