//! [`TokenFile`]: file of 16-bit or 32-bit tokens after a header of 1024 bytes, as written by
//! llm.c, llmq or this crate.
//!
//! ```text
//! llm.c    20240520, 1, tokens | 20240801, 7, tokens           u32 each; tokens of 16 | 32 bits
//! llmq     "BIN.TOK\n", version, 4, tokens, vocabulary, has mask   u32 each; 32-bit tokens, mask
//! ours     JSON object and spaces, see [`Header`];       tokens of 16 | 32 bits, mask, starts
//! mask     one bit per token, lowest bit of a byte first: 1 if the loss counts it as a target
//! starts   index of the first token of each document, 64 bits each
//! ```

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::DataError;
use super::error::cannot_read;
use super::raw_file::RawFile;
use crate::{Tokenizer, files};

/// Bytes before the first token.
pub(super) const HEADER: u64 = 1024;
/// Tokens whose mask is counted at once, and documents listed at once.
const CHUNK: u64 = 1 << 16;

/// Width of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Width {
    #[serde(rename = "uint16")]
    Two,
    #[serde(rename = "uint32")]
    Four,
}

impl Width {
    /// Smallest width for all ids below `vocab_size`.
    pub(super) fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    pub(super) fn encode(self, ids: &[u32]) -> Vec<u8> {
        match self {
            Self::Two => ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
            Self::Four => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<u32> {
        match self {
            Self::Two => bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect(),
            Self::Four => bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        }
    }
}

/// Header of a token file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    #[serde(rename = "dtype")]
    pub(super) width: Width,
    pub(super) tokens: u64,
    pub(super) has_mask: bool,
    /// Number of documents that the file lists; `None` without a list.
    pub(super) documents: Option<u64>,
    /// Fingerprint of the tokenizer, if the file has it.
    pub(super) tokenizer: Option<String>,
}

impl Header {
    pub(super) fn read(path: &Path) -> Result<Self, DataError> {
        let fail = |reason: String| DataError::TokenFile { path: path.into(), reason };
        let mut begin = vec![];
        let file = files::open(path).map_err(cannot_read(path))?;
        let bytes = file.metadata().map_err(cannot_read(path))?.len();
        file.take(HEADER).read_to_end(&mut begin).map_err(cannot_read(path))?;
        if (begin.len() as u64) < HEADER {
            return Err(fail(format!("it has {} bytes, its header alone would have {HEADER}", begin.len())));
        }
        let mut header = Self::parse(&begin).map_err(fail)?;
        // Other formats have 31 bits for the count. In a larger file, the file size gives it.
        let fits = (bytes - HEADER) / header.width.bytes();
        if header.documents.is_none() && !header.has_mask && fits > i32::MAX as u64 {
            header.tokens = fits;
        }
        match header.size() {
            expected if expected == bytes.into() => Ok(header),
            expected => Err(fail(format!(
                "its header says {} tokens, with which it would have {expected} bytes; it has {bytes}",
                header.tokens
            ))),
        }
    }

    fn parse(begin: &[u8]) -> Result<Self, String> {
        let numbers: Vec<u32> = begin.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let (width, tokens, has_mask) = match (numbers[0], numbers[1]) {
            _ if begin.starts_with(b"{") => return serde_json::from_slice(begin).map_err(|error| error.to_string()),
            _ if begin.starts_with(b"BIN.TOK\n") => match (numbers[2], numbers[3]) {
                (1, 4) => (Width::Four, numbers[4], false),
                (2, 4) => (Width::Four, numbers[4], numbers[6] != 0),
                (version, width) => {
                    return Err(format!(
                        "version {version} with {width} bytes a token; versions 1 and 2 with 4 bytes are read"
                    ));
                }
            },
            (20240520, 1) => (Width::Two, numbers[2], false),
            (20240801, 7) => (Width::Four, numbers[2], false),
            (magic, version) => {
                return Err(format!(
                    "it begins with {magic} and version {version}; 20240520 and 1 (GPT-2), 20240801 and 7 (Llama 3) and BIN.TOK \
                     (llmq) are read"
                ));
            }
        };
        Ok(Self { width, tokens: tokens.into(), has_mask, documents: None, tokenizer: None })
    }

    /// All bytes of the header.
    pub(super) fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(HEADER as usize, b' ');
        Ok(bytes)
    }

    /// Offset of the mask, if there is one. An invalid header may claim more tokens than any file
    /// has.
    fn mask_at(&self) -> u128 {
        u128::from(HEADER) + u128::from(self.width.bytes()) * u128::from(self.tokens)
    }

    fn starts_at(&self) -> u128 {
        self.mask_at() + if self.has_mask { self.tokens.div_ceil(8).into() } else { 0 }
    }

    /// Size of the whole file in bytes.
    fn size(&self) -> u128 {
        self.starts_at() + 8 * u128::from(self.documents.unwrap_or_default())
    }

    /// Number of tokens in the first `bytes` of the file.
    pub(super) fn tokens_within(&self, bytes: u64) -> u64 {
        (bytes.saturating_sub(HEADER) / self.width.bytes()).min(self.tokens)
    }
}

/// Tokens in a file.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: RawFile,
    header: Header,
    len: u64,
    vocab_size: usize,
    /// Offsets of the mask and of the document starts, if there are any.
    mask: Option<u64>,
    starts: Option<u64>,
}

impl TokenFile {
    /// Opens a file and uses its first `taken` bytes.
    ///
    /// # Errors
    /// [`DataError::OtherTokenizer`] if the file names another tokenizer.
    pub(super) fn open(path: &Path, taken: u64, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let header = Header::read(path)?;
        if header.tokenizer.as_ref().is_some_and(|with| *with != tokenizer.fingerprint()) {
            return Err(DataError::OtherTokenizer { path: path.into() });
        }
        // The header has been checked against the file size, so these fit in `u64`.
        let [mask, starts] = [header.mask_at(), header.starts_at()].map(|at| at as u64);
        Ok(Self {
            file: RawFile::open(path)?,
            len: header.tokens_within(taken),
            vocab_size: tokenizer.vocab_size(),
            mask: header.has_mask.then_some(mask),
            starts: header.documents.is_some().then_some(starts),
            header,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Length in tokens.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn has_mask(&self) -> bool {
        self.mask.is_some()
    }

    pub(super) fn lists_documents(&self) -> bool {
        self.starts.is_some()
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u32>, DataError> {
        let width = self.header.width;
        let begin = HEADER + range.start * width.bytes();
        let bytes = self.file.read(begin, ((range.end - range.start) * width.bytes()) as usize)?;
        let tokens = width.decode(&bytes);
        match tokens.iter().position(|token| *token as usize >= self.vocab_size) {
            None => Ok(tokens),
            Some(i) => Err(DataError::Vocabulary {
                path: self.path().into(),
                token: tokens[i],
                place: range.start + i as u64,
                byte: begin + i as u64 * width.bytes(),
                vocab_size: self.vocab_size,
            }),
        }
    }

    /// Whether the loss counts each token in `range` as a target; `None` without a mask.
    pub(super) fn read_mask(&self, range: Range<u64>) -> Result<Option<Vec<bool>>, DataError> {
        let Some(mask) = self.mask else { return Ok(None) };
        let first = range.start / 8;
        let bytes = self.file.read(mask + first, (range.end.div_ceil(8) - first) as usize)?;
        Ok(Some(range.map(|place| bytes[(place / 8 - first) as usize] >> (place % 8) & 1 == 1).collect()))
    }

    /// Number of tokens in `range` that count as targets.
    pub(super) fn count_targets(&self, range: Range<u64>) -> Result<u64, DataError> {
        let mut count = 0;
        for begin in range.clone().step_by(CHUNK as usize) {
            let end = range.end.min(begin + CHUNK);
            let mask = self.read_mask(begin..end)?;
            count += mask.map_or(end - begin, |mask| mask.iter().filter(|counts| **counts).count() as u64);
        }
        Ok(count)
    }

    /// Visits the documents that the file lists, each as a range of tokens.
    pub(super) fn each_document(
        &self,
        mut visit: impl FnMut(Range<u64>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (Some(starts), Some(documents)) = (self.starts, self.header.documents) else { return Ok(()) };
        let mut begin = 0;
        for first in (0..documents).step_by(CHUNK as usize) {
            let count = CHUNK.min(documents - first) as usize;
            for (i, start) in self.file.numbers(starts + 8 * first, count)?.into_iter().enumerate() {
                let is_first = first == 0 && i == 0;
                if start >= self.header.tokens || (is_first && start > 0) || (!is_first && start <= begin) {
                    let reason = format!("document {} begins at token {start}, which cannot be", first + i as u64);
                    return Err(DataError::TokenFile { path: self.path().into(), reason });
                }
                if start > begin {
                    visit(begin..start.min(self.len))?;
                }
                begin = start;
                if begin >= self.len {
                    return Ok(());
                }
            }
        }
        if begin < self.len { visit(begin..self.len) } else { Ok(()) }
    }
}
