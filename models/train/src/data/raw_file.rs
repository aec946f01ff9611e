//! [`RawFile`]: random access to bytes and numbers of a file. [`Pairs`]: writer of a list of number
//! pairs. Files are not memory-mapped, since pages once read would stay in memory.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::NamedTempFile;

use super::DataError;
use super::error::{cannot_read, cannot_write};
use crate::{atomic, files};

/// File that any thread can read at any position.
#[derive(Debug)]
pub(super) struct RawFile {
    path: PathBuf,
    file: Mutex<File>,
}

impl RawFile {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let file = files::open(path).map_err(cannot_read(path))?;
        Ok(Self { path: path.into(), file: Mutex::new(file) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads `len` bytes from `begin`. A file that has become shorter is an error.
    pub(super) fn read(&self, begin: u64, len: usize) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; len];
        let mut read = || -> io::Result<()> {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            file.seek(SeekFrom::Start(begin))?;
            file.read_exact(&mut bytes)
        };
        read().map_err(cannot_read(&self.path))?;
        Ok(bytes)
    }

    /// Reads `len` 64-bit numbers from byte `begin`.
    pub(super) fn numbers(&self, begin: u64, len: usize) -> Result<Vec<u64>, DataError> {
        let bytes = self.read(begin, 8 * len)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// Reads `len` pairs of 64-bit numbers, beginning with pair `first` of the file.
    pub(super) fn pairs(&self, first: u64, len: u64) -> Result<Vec<[u64; 2]>, DataError> {
        Ok(self.numbers(16 * first, 2 * len as usize)?.as_chunks().0.to_vec())
    }
}

/// File of pairs of 64-bit numbers that is being written.
pub(super) struct Pairs {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
}

impl Pairs {
    pub(super) fn create(path: PathBuf) -> Result<Self, DataError> {
        let out = BufWriter::new(atomic::create(&path).map_err(cannot_write(&path))?);
        Ok(Self { path, out })
    }

    pub(super) fn push(&mut self, pair: [u64; 2]) -> Result<(), DataError> {
        self.out.write_all(pair.map(u64::to_le_bytes).as_flattened()).map_err(cannot_write(&self.path))
    }

    /// Writes the rest and gives the file its name.
    pub(super) fn finish(self) -> Result<(), DataError> {
        let Self { path, out } = self;
        let written = out.into_inner().map_err(io::IntoInnerError::into_error);
        written.and_then(|file| atomic::finish(file, &path)).map_err(cannot_write(&path))
    }
}
