//! [`TokenFile`]: tokens of 16 or 32 bits in a file, as llm.c and llmq write them after a header of 1024 bytes, and as the cache has
//! them without one.

use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use super::DataError;
use super::error::cannot_read;
use super::raw_file::RawFile;
use crate::files;

/// Bytes before the first token.
const HEADER: u64 = 1024;

/// Bytes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Two,
    Four,
}

impl Width {
    /// The smaller one that has room for all ids below `vocab_size`.
    pub(super) fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Appends `ids` to `bytes`.
    pub(super) fn encode(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::Two => bytes.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
            Self::Four => bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<u32> {
        match self {
            Self::Two => bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect(),
            Self::Four => bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        }
    }
}

/// What the header of a token file says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    width: Width,
    tokens: u64,
    has_mask: bool,
}

impl Header {
    pub(super) fn read(path: &Path) -> Result<Self, DataError> {
        let fail = |reason: String| DataError::TokenFile { path: path.into(), reason };
        let bytes = fs::metadata(path).map_err(cannot_read(path))?.len();
        let mut header = vec![];
        files::open(path).and_then(|file| file.take(HEADER).read_to_end(&mut header)).map_err(cannot_read(path))?;
        if (header.len() as u64) < HEADER {
            return Err(fail(format!("it has {} bytes, its header alone would have {HEADER}", header.len())));
        }
        let numbers: Vec<u32> = header.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let (width, count, has_mask) = match (numbers[0], numbers[1]) {
            _ if header.starts_with(b"BIN.TOK\n") => match (numbers[2], numbers[3]) {
                (1, 4) => (Width::Four, numbers[4], false),
                (2, 4) => (Width::Four, numbers[4], numbers[6] != 0),
                (version, width) => {
                    return Err(fail(format!(
                        "version {version} with {width} bytes a token; versions 1 and 2 with 4 bytes are read"
                    )));
                }
            },
            (20240520, 1) => (Width::Two, numbers[2], false),
            (20240801, 7) => (Width::Four, numbers[2], false),
            (magic, version) => {
                return Err(fail(format!(
                    "it begins with {magic} and version {version}; 20240520 and 1 (GPT-2), 20240801 and 7 (Llama 3) and BIN.TOK \
                     (llmq) are read"
                )));
            }
        };
        let size_of = |tokens: u64| HEADER + width.bytes() * tokens + if has_mask { tokens.div_ceil(8) } else { 0 };
        let fits = (bytes - HEADER) / width.bytes();
        // The header has 31 bits for the count; of a file with more tokens, its size tells.
        let tokens = if fits > i32::MAX as u64 && !has_mask { fits } else { count.into() };
        if bytes != size_of(tokens) {
            let expected = size_of(tokens);
            return Err(fail(format!(
                "its header says {tokens} tokens, with which it would have {expected} bytes; it has {bytes}"
            )));
        }
        Ok(Self { width, tokens, has_mask })
    }

    /// Tokens in the first `bytes` of the file.
    pub(super) fn tokens_within(self, bytes: u64) -> u64 {
        (bytes.saturating_sub(HEADER) / self.width.bytes()).min(self.tokens)
    }
}

/// Tokens in a file.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: RawFile,
    header: u64,
    width: Width,
    len: u64,
    vocab_size: usize,
    /// Where the bits of the tokens are, if there are any: the loss counts where a token with a one is the target.
    mask: Option<u64>,
}

impl TokenFile {
    /// A file of llm.c or llmq, of which the first `taken` bytes are taken.
    pub(super) fn open(path: &Path, taken: u64, vocab_size: usize) -> Result<Self, DataError> {
        let header = Header::read(path)?;
        let len = header.tokens_within(taken);
        let file = RawFile::open(path)?;
        let mask = header.has_mask.then_some(HEADER + header.tokens * header.width.bytes());
        Ok(Self { file, header: HEADER, width: header.width, len, vocab_size, mask })
    }

    /// `len` tokens without a header.
    pub(super) fn open_bare(path: &Path, len: u64, vocab_size: usize) -> Result<Self, DataError> {
        let width = Width::for_vocabulary(vocab_size);
        Ok(Self { file: RawFile::open(path)?, header: 0, width, len, vocab_size, mask: None })
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn has_mask(&self) -> bool {
        self.mask.is_some()
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u32>, DataError> {
        let begin = self.header + range.start * self.width.bytes();
        let bytes = self.file.read(begin, ((range.end - range.start) * self.width.bytes()) as usize)?;
        let tokens = self.width.decode(&bytes);
        match tokens.iter().position(|token| *token as usize >= self.vocab_size) {
            None => Ok(tokens),
            Some(i) => Err(DataError::Vocabulary {
                path: self.file.path().into(),
                token: tokens[i],
                place: range.start + i as u64,
                byte: begin + i as u64 * self.width.bytes(),
                vocab_size: self.vocab_size,
            }),
        }
    }

    /// Whether the loss counts where the tokens in `range` are targets; none if the file does not say.
    pub(super) fn read_mask(&self, range: Range<u64>) -> Result<Option<Vec<bool>>, DataError> {
        let Some(mask) = self.mask else { return Ok(None) };
        let first = range.start / 8;
        let bytes = self.file.read(mask + first, (range.end.div_ceil(8) - first) as usize)?;
        Ok(Some(range.map(|place| bytes[(place / 8 - first) as usize] >> (place % 8) & 1 == 1).collect()))
    }
}
