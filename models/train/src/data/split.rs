//! Documents, as they come, to two streams on disk: one to train on and one that is held out. A document of any length fits.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::DataError;
use super::cache::has_size;
use super::encode::Tokenized;
use super::error::cannot_write;
use super::token_file::Width;

/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;

/// The files of a stream.
pub(super) struct StreamFiles {
    /// Tokens of [`Width::for_vocabulary`].
    pub(super) tokens: PathBuf,
    /// Where each document begins, in tokens, 64 bits each.
    pub(super) starts: PathBuf,
    /// A byte for each token, 1 where the loss counts; not there if it counts everywhere.
    pub(super) mask: PathBuf,
}

impl StreamFiles {
    pub(super) fn train(folder: &Path) -> Self {
        Self::named(folder, "train")
    }

    pub(super) fn held_out(folder: &Path) -> Self {
        Self::named(folder, "held_out")
    }

    fn named(folder: &Path, name: &str) -> Self {
        let [tokens, starts, mask] =
            ["tokens", "starts", "mask"].map(|extension| folder.join(name).with_extension(extension));
        Self { tokens, starts, mask }
    }

    pub(super) fn are_whole(&self, stream: StreamSize, width: Width, has_mask: bool) -> bool {
        has_size(&self.tokens, stream.tokens * width.bytes())
            && has_size(&self.starts, stream.documents * 8)
            && (!has_mask || has_size(&self.mask, stream.tokens))
    }
}

/// How much is in a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StreamSize {
    pub(super) tokens: u64,
    pub(super) documents: u64,
    /// Tokens that the loss counts.
    pub(super) targets: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Streams {
    pub(super) train: StreamSize,
    pub(super) held_out: StreamSize,
    pub(super) has_mask: bool,
    /// Whether versions before this one may have made other tokens of the documents.
    pub(super) is_new: bool,
}

/// Deals documents to the two streams.
pub(super) struct Split {
    fraction: f64,
    width: Width,
    train: Stream,
    held_out: Stream,
    /// Where the document that is being written begins in `train`.
    begin: u64,
    has_mask: bool,
    is_new: bool,
}

impl Split {
    pub(super) fn create(folder: &Path, fraction: f64, width: Width) -> Result<Self, DataError> {
        let train = Stream::create(StreamFiles::train(folder))?;
        let held_out = Stream::create(StreamFiles::held_out(folder))?;
        Ok(Self { fraction, width, train, held_out, begin: 0, has_mask: false, is_new: false })
    }

    /// The next part of a document.
    pub(super) fn push(&mut self, part: &Tokenized) -> Result<(), DataError> {
        self.is_new |= part.is_new;
        if part.mask.is_some() && !self.has_mask {
            self.has_mask = true;
            self.train.begin_mask()?;
            self.held_out.begin_mask()?;
        }
        let mut bytes = vec![];
        self.width.encode(&part.ids, &mut bytes);
        self.train.tokens.append(&bytes)?;
        self.train.len += part.ids.len() as u64;
        let counted = part.mask.as_ref().map_or(part.ids.len(), |mask| mask.iter().filter(|counts| **counts).count());
        self.train.targets += counted as u64;
        if let Some(mask) = &mut self.train.mask {
            let bytes = match &part.mask {
                Some(counts) => counts.iter().map(|counts| u8::from(*counts)).collect(),
                None => vec![1; part.ids.len()],
            };
            mask.append(&bytes)?;
        }
        if part.ends { self.end_document() } else { Ok(()) }
    }

    /// A document is held out when the held-out stream is behind its share by the document's length or more.
    fn end_document(&mut self) -> Result<(), DataError> {
        let len = self.train.len - self.begin;
        if len == 0 {
            return Ok(());
        }
        let total = self.train.len + self.held_out.len;
        let behind = self.fraction * total as f64 - self.held_out.len as f64;
        if len as f64 <= behind {
            self.held_out.begin_document(self.held_out.len)?;
            self.train.move_tail(self.begin, &mut self.held_out, self.width)?;
        } else {
            self.train.begin_document(self.begin)?;
        }
        self.begin = self.train.len;
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<Streams, DataError> {
        let total = self.train.len + self.held_out.len;
        let wanted = (self.fraction * total as f64) as u64;
        // Few documents, or only large ones: the end of the training stream makes up for it.
        if self.held_out.len * 2 < wanted {
            let cut = self.train.len - (wanted - self.held_out.len);
            self.train.move_documents(cut, &mut self.held_out)?;
            self.train.move_tail(cut, &mut self.held_out, self.width)?;
        }
        let Self { has_mask, is_new, .. } = self;
        Ok(Streams { train: self.train.finish()?, held_out: self.held_out.finish()?, has_mask, is_new })
    }
}

/// A stream that is being written.
struct Stream {
    files: StreamFiles,
    tokens: Column,
    starts: Column,
    mask: Option<Column>,
    /// In tokens.
    len: u64,
    documents: u64,
    targets: u64,
}

impl Stream {
    fn create(files: StreamFiles) -> Result<Self, DataError> {
        let (tokens, starts) = (Column::create(&files.tokens)?, Column::create(&files.starts)?);
        Ok(Self { files, tokens, starts, mask: None, len: 0, documents: 0, targets: 0 })
    }

    /// The loss counts at all tokens so far.
    fn begin_mask(&mut self) -> Result<(), DataError> {
        let mut mask = Column::create(&self.files.mask)?;
        let mut left = self.len;
        while left > 0 {
            let now = left.min(CHUNK as u64);
            mask.append(&vec![1; now as usize])?;
            left -= now;
        }
        self.mask = Some(mask);
        Ok(())
    }

    fn begin_document(&mut self, begin: u64) -> Result<(), DataError> {
        self.documents += 1;
        self.starts.append(&begin.to_le_bytes())
    }

    /// The tokens from `begin` on, and where the loss counts, to the end of `to`.
    fn move_tail(&mut self, begin: u64, to: &mut Self, width: Width) -> Result<(), DataError> {
        self.tokens.move_tail(begin * width.bytes(), |bytes| to.tokens.append(bytes))?;
        let mut targets = self.len - begin;
        if let (Some(mask), Some(to)) = (&mut self.mask, &mut to.mask) {
            targets = 0;
            mask.move_tail(begin, |bytes| {
                targets += bytes.iter().filter(|byte| **byte != 0).count() as u64;
                to.append(bytes)
            })?;
        }
        self.targets -= targets;
        to.targets += targets;
        to.len += self.len - begin;
        self.len = begin;
        Ok(())
    }

    /// The documents that begin at `begin` or later, and the end of the one before, which there is a document of its own.
    fn move_documents(&mut self, begin: u64, to: &mut Self) -> Result<(), DataError> {
        let mut kept = self.documents;
        while kept > 0 && self.starts.number(kept - 1)? >= begin {
            kept -= 1;
        }
        if kept == self.documents || self.starts.number(kept)? != begin {
            to.begin_document(to.len)?;
        }
        let (len, documents) = (to.len, self.documents - kept);
        self.starts.move_tail(8 * kept, |bytes| {
            let moved = bytes.as_chunks().0.iter().map(|start| u64::from_le_bytes(*start) - begin + len);
            to.starts.append(&moved.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
        })?;
        to.documents += documents;
        self.documents = kept;
        Ok(())
    }

    fn finish(self) -> Result<StreamSize, DataError> {
        self.tokens.finish()?;
        self.starts.finish()?;
        self.mask.map(Column::finish).transpose()?;
        Ok(StreamSize { tokens: self.len, documents: self.documents, targets: self.targets })
    }
}

/// A file to whose end bytes are written, and from whose end they are taken back.
struct Column {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Column {
    fn create(path: &Path) -> Result<Self, DataError> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
        Ok(Self { path: path.into(), file: BufWriter::with_capacity(CHUNK, file.map_err(cannot_write(path))?) })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.file.write_all(bytes).map_err(cannot_write(&self.path))
    }

    /// Gives what follows `begin` to `take`, in multiples of 8 bytes but for the last, and removes it.
    fn move_tail(&mut self, begin: u64, mut take: impl FnMut(&[u8]) -> Result<(), DataError>) -> Result<(), DataError> {
        let failed = cannot_write(&self.path);
        let mut left = self.file.seek(SeekFrom::End(0)).map_err(&failed)? - begin;
        self.file.seek(SeekFrom::Start(begin)).map_err(&failed)?;
        while left > 0 {
            let mut bytes = vec![0; left.min(CHUNK as u64) as usize];
            self.file.get_mut().read_exact(&mut bytes).map_err(&failed)?;
            take(&bytes)?;
            left -= bytes.len() as u64;
        }
        let mut cut = || -> io::Result<()> {
            self.file.get_mut().set_len(begin)?;
            self.file.seek(SeekFrom::Start(begin))?;
            Ok(())
        };
        cut().map_err(failed)
    }

    /// The number of 64 bits at `index`.
    fn number(&mut self, index: u64) -> Result<u64, DataError> {
        let mut read = || -> io::Result<u64> {
            let mut bytes = [0; 8];
            self.file.seek(SeekFrom::Start(8 * index))?;
            self.file.get_mut().read_exact(&mut bytes)?;
            self.file.seek(SeekFrom::End(0))?;
            Ok(u64::from_le_bytes(bytes))
        };
        read().map_err(cannot_write(&self.path))
    }

    fn finish(self) -> Result<(), DataError> {
        let failed = cannot_write(&self.path);
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(&failed)
    }
}
