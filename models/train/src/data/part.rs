//! [`Part`]: a token stream on disk, with the places where documents begin and where the loss counts. A part is the training or the
//! held-out stream of a source's documents, or the beginning or the end of a token file.

use std::ops::Range;
use std::path::Path;

use super::DataError;
use super::raw_file::RawFile;
use super::split::{StreamFiles, StreamSize};
use super::token_file::TokenFile;

/// Numbers that are read at once, and tokens.
const CHUNK: u64 = 1 << 16;

/// The tokens between which documents change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
}

/// A token stream on disk.
#[derive(Debug)]
pub(super) struct Part {
    /// The digest of everything that decides what is in it.
    pub(super) fingerprint: String,
    tokens: TokenFile,
    /// Where in the file it begins.
    first: u64,
    len: u64,
    documents: Documents,
    mask: Option<RawFile>,
    /// Tokens that the loss counts; unknown where a token file has the mask.
    targets: Option<u64>,
}

#[derive(Debug)]
enum Documents {
    /// So many documents, whose starts are in this file.
    Listed(RawFile, u64),
    /// They begin with BOS; if there is none, they end with EOS.
    Marked(Marks),
}

/// A range of a stream.
pub(super) struct Window {
    pub(super) tokens: Vec<u32>,
    /// The places in `tokens` at which documents begin.
    pub(super) starts: Vec<usize>,
    /// Whether the loss counts where a token is the target.
    pub(super) mask: Option<Vec<bool>>,
}

impl Part {
    /// A stream of the cache.
    pub(super) fn cached(
        files: &StreamFiles,
        size: StreamSize,
        has_mask: bool,
        vocab_size: usize,
        fingerprint: String,
    ) -> Result<Self, DataError> {
        let tokens = TokenFile::open_bare(&files.tokens, size.tokens, vocab_size)?;
        let documents = Documents::Listed(RawFile::open(&files.starts)?, size.documents);
        let mask = has_mask.then(|| RawFile::open(&files.mask)).transpose()?;
        Ok(Self { fingerprint, tokens, first: 0, len: size.tokens, documents, mask, targets: Some(size.targets) })
    }

    /// A range of a token file.
    pub(super) fn of_token_file(
        path: &Path,
        taken: u64,
        range: Range<u64>,
        marks: Marks,
        vocab_size: usize,
        fingerprint: String,
    ) -> Result<Self, DataError> {
        let tokens = TokenFile::open(path, taken, vocab_size)?;
        let (first, len, documents) = (range.start, range.end - range.start, Documents::Marked(marks));
        let targets = (!tokens.has_mask()).then_some(len);
        Ok(Self { fingerprint, tokens, first, len, documents, mask: None, targets })
    }

    /// In tokens.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn has_mask(&self) -> bool {
        self.mask.is_some() || self.tokens.has_mask()
    }

    /// Where they are listed.
    pub(super) fn num_documents(&self) -> Option<u64> {
        match self.documents {
            Documents::Listed(_, documents) => Some(documents),
            Documents::Marked(_) => None,
        }
    }

    /// Tokens that the loss counts; unknown where a token file has the mask.
    pub(super) fn num_targets(&self) -> Option<u64> {
        self.targets
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Window, DataError> {
        let absolute = self.first + range.start..self.first + range.end;
        let mask = match &self.mask {
            Some(file) => {
                let bytes = file.read(range.start, (range.end - range.start) as usize)?;
                Some(bytes.into_iter().map(|byte| byte != 0).collect())
            }
            None => self.tokens.read_mask(absolute.clone())?,
        };
        let (tokens, starts) = match &self.documents {
            Documents::Listed(file, documents) => {
                let first = first_start(file, *documents, range.start)?;
                let end = first_start(file, *documents, range.end)?;
                let starts = file.numbers(first, (end - first) as usize)?;
                (self.tokens.read(absolute)?, starts.iter().map(|start| (start - range.start) as usize).collect())
            }
            Documents::Marked(marks) => {
                // With the token before, which may be the end of a document.
                let before = u64::from(absolute.start > 0);
                let mut tokens = self.tokens.read(absolute.start - before..absolute.end)?;
                let begins = |place: usize| match (marks.bos, marks.eos) {
                    (Some(bos), _) => tokens[place] == bos,
                    // Nothing comes before the first token of the file.
                    (None, Some(eos)) => place == 0 || tokens[place - 1] == eos,
                    (None, None) => place == 0 && absolute.start == 0,
                };
                let before = before as usize;
                let starts =
                    (before..tokens.len()).filter(|place| begins(*place)).map(|place| place - before).collect();
                tokens.drain(..before);
                (tokens, starts)
            }
        };
        Ok(Window { tokens, starts, mask })
    }

    /// The number of the document that `place` is in, where documents are numbered, and the offset in it; else that in the file.
    pub(super) fn document_at(&self, place: u64) -> Result<(Option<u64>, u64), DataError> {
        let Documents::Listed(file, documents) = &self.documents else { return Ok((None, self.first + place)) };
        let document = first_start(file, *documents, place + 1)?.saturating_sub(1);
        Ok((Some(document), place - file.numbers(document, 1)?[0]))
    }

    /// Visits all documents in their order, each as the range of its tokens.
    pub(super) fn each_document(
        &self,
        mut visit: impl FnMut(Range<u64>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut begin = 0;
        let mut boundary = |start: u64| -> Result<(), DataError> {
            // The first one may have begun before this part.
            if start > begin {
                visit(begin..start)?;
                begin = start;
            }
            Ok(())
        };
        match &self.documents {
            Documents::Listed(file, documents) => {
                for first in (0..*documents).step_by(CHUNK as usize) {
                    let starts = file.numbers(first, CHUNK.min(documents - first) as usize)?;
                    starts.into_iter().try_for_each(&mut boundary)?;
                }
            }
            Documents::Marked(_) => {
                for first in (0..self.len).step_by(CHUNK as usize) {
                    let starts = self.read(first..self.len.min(first + CHUNK))?.starts;
                    starts.into_iter().try_for_each(|start| boundary(first + start as u64))?;
                }
            }
        }
        boundary(self.len)
    }
}

/// The number of the first document that begins at `place` or later.
fn first_start(file: &RawFile, documents: u64, place: u64) -> Result<u64, DataError> {
    let (mut low, mut high) = (0, documents);
    while low < high {
        let middle = low + (high - low) / 2;
        if file.numbers(middle, 1)?[0] < place {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Ok(low)
}
