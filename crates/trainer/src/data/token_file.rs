//! [`TokenFile`] and [`TokenWriter`]: file of 16-bit or 32-bit tokens after a header of 1024 bytes.
//!
//! ```text
//! header   JSON object and spaces, see [`Header`]
//! mask     one bit per token, lowest bit of a byte first: 1 if the loss counts it as a target
//! starts   index of the first token of each document, 64 bits each
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tempfile::NamedTempFile;

use super::{cannot_read, cannot_write};
use crate::{Tokenizer, atomic, files};

/// Bytes before the first token.
pub(super) const HEADER: u64 = 1024;
/// Tokens whose mask is counted at once.
const CHUNK: u64 = 1 << 16;

/// Width of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Width {
    #[serde(rename = "uint16")]
    Two = 2,
    #[serde(rename = "uint32")]
    Four = 4,
}

impl Width {
    /// Smallest width for all ids below `vocab_size`.
    pub(super) fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    fn bytes(self) -> u64 {
        self as u64
    }

    pub(super) fn encode(self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(self as usize)).collect()
    }

    fn decode(self, bytes: &[u8]) -> Vec<u32> {
        match self {
            Self::Two => bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect(),
            Self::Four => bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
        }
    }
}

/// Version of the format of token files.
pub(super) const FORMAT: u64 = 1;

/// Header of a token file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    /// Equal to [`FORMAT`].
    format: u64,
    #[serde(rename = "dtype")]
    pub(super) width: Width,
    pub(super) tokens: u64,
    pub(super) has_mask: bool,
    /// Number of documents.
    pub(super) documents: u64,
    /// Fingerprint of the tokenizer.
    pub(super) tokenizer: String,
}

impl Header {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut begin = vec![];
        let file = files::open(path).with_context(cannot_read(path))?;
        let bytes = file.metadata().with_context(cannot_read(path))?.len();
        file.take(HEADER).read_to_end(&mut begin).with_context(cannot_read(path))?;
        Self::parse(&begin, bytes).map_err(|reason| anyhow!("{} is no token file: {reason:#}", path.display()))
    }

    /// Header that begins a file of `bytes` bytes.
    fn parse(begin: &[u8], bytes: u64) -> Result<Self> {
        ensure!(begin.len() as u64 == HEADER, "it has {bytes} bytes, its header alone would have {HEADER}");
        ensure!(begin.starts_with(b"{"), "only token files of `float8 tokenize` are read");
        let fields: Map<String, Value> = serde_json::from_slice(begin)?;
        let format = fields.get("format").map_or_else(|| "none".into(), Value::to_string);
        ensure!(
            format == FORMAT.to_string(),
            "its format is {format}, and this version reads {FORMAT}: tokenize again"
        );
        let header: Self = serde_json::from_value(fields.into())?;
        let (tokens, expected) = (header.tokens, header.size());
        ensure!(
            expected == bytes.into(),
            "its header says {tokens} tokens, with which it would have {expected} bytes; it has {bytes}"
        );
        Ok(header)
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
        self.starts_at() + 8 * u128::from(self.documents)
    }

    /// Number of tokens in the first `bytes` of the file.
    pub(super) fn tokens_within(&self, bytes: u64) -> u64 {
        (bytes.saturating_sub(HEADER) / self.width.bytes()).min(self.tokens)
    }
}

/// Tokens in a file, which any thread can read. It is not memory-mapped, since pages once read would
/// stay in memory.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    file: Mutex<File>,
    header: Header,
    len: u64,
    vocab_size: usize,
}

impl TokenFile {
    /// Opens a file and uses its first `taken` bytes. A file that names another tokenizer is an
    /// error.
    pub(super) fn open(path: &Path, taken: u64, tokenizer: &Tokenizer) -> Result<Self> {
        let header = Header::read(path)?;
        ensure!(
            header.tokenizer == tokenizer.fingerprint(),
            "{} was made with another tokenizer, or one whose files have changed since: use that one, or tokenize again",
            path.display()
        );
        let file = Mutex::new(files::open(path).with_context(cannot_read(path))?);
        let (len, vocab_size) = (header.tokens_within(taken), tokenizer.vocab_size());
        Ok(Self { path: path.into(), file, len, vocab_size, header })
    }

    pub(super) fn has_mask(&self) -> bool {
        self.header.has_mask
    }

    /// Reads `len` bytes from `begin`. A file that has become shorter is an error.
    fn bytes(&self, begin: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(begin)).and_then(|_| file.read_exact(&mut bytes));
        read.with_context(cannot_read(&self.path))?;
        Ok(bytes)
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u32>> {
        let width = self.header.width;
        let begin = HEADER + range.start * width.bytes();
        let tokens = width.decode(&self.bytes(begin, (range.end - range.start) * width.bytes())?);
        match tokens.iter().position(|token| *token as usize >= self.vocab_size) {
            None => Ok(tokens),
            Some(i) => bail!(
                "{}: token {} at place {} (byte {}), but the tokenizer, or the model, has ids below {}: use those that this file was \
                 made for",
                self.path.display(),
                tokens[i],
                range.start + i as u64,
                begin + i as u64 * width.bytes(),
                self.vocab_size
            ),
        }
    }

    /// Whether the loss counts each token in `range` as a target; `None` without a mask.
    pub(super) fn read_mask(&self, range: Range<u64>) -> Result<Option<Vec<bool>>> {
        if !self.has_mask() {
            return Ok(None);
        }
        let first = range.start / 8;
        // The header has been checked against the file size, so this fits.
        let bytes = self.bytes(self.header.mask_at() as u64 + first, range.end.div_ceil(8) - first)?;
        Ok(Some(range.map(|place| bytes[(place / 8 - first) as usize] >> (place % 8) & 1 == 1).collect()))
    }

    /// Number of tokens in `range` that count as targets.
    pub(super) fn count_targets(&self, range: Range<u64>) -> Result<u64> {
        let mut count = 0;
        for begin in range.clone().step_by(CHUNK as usize) {
            let end = range.end.min(begin + CHUNK);
            let mask = self.read_mask(begin..end)?;
            count += mask.map_or(end - begin, |mask| mask.iter().filter(|counts| **counts).count() as u64);
        }
        Ok(count)
    }

    /// Documents, each as a range of tokens.
    pub(super) fn documents(&self) -> Result<Vec<Range<u64>>> {
        let bytes = self.bytes(self.header.starts_at() as u64, 8 * self.header.documents)?;
        let starts: Vec<u64> = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let is_wrong = |i: &usize| {
            starts[*i] >= self.header.tokens || if *i == 0 { starts[0] > 0 } else { starts[*i] <= starts[i - 1] }
        };
        if let Some(i) = (0..starts.len()).find(is_wrong) {
            bail!(
                "{} is no token file: document {i} begins at token {}, which cannot be",
                self.path.display(),
                starts[i]
            );
        }
        let ends = starts.iter().skip(1).copied().chain([self.header.tokens]);
        let documents = starts.iter().zip(ends).map(|(start, end)| *start..end.min(self.len));
        Ok(documents.filter(|document| !document.is_empty()).collect())
    }
}

/// Tokens of a document or of a part of one.
#[derive(Default)]
pub(super) struct Tokenized {
    pub(super) ids: Vec<u32>,
    /// Whether the loss counts each token as a target. `None` counts all.
    pub(super) mask: Option<Vec<bool>>,
    /// Whether the document ends here.
    pub(super) ends: bool,
}

/// Writer of a token file. The header is written last.
pub(super) struct TokenWriter {
    path: PathBuf,
    header: Header,
    /// Index of the first token of the current document.
    begin: u64,
    tokens: BufWriter<NamedTempFile>,
    mask: BufWriter<File>,
    /// Mask of the last tokens, which fill no byte yet.
    bits: Vec<bool>,
    starts: BufWriter<File>,
}

impl TokenWriter {
    pub(super) fn create(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let create = || -> io::Result<Self> {
            // The mask and the starts follow the tokens, whose number is not known yet.
            let folder = path.parent().unwrap_or(Path::new("."));
            let beside = || tempfile::tempfile_in(folder).map(BufWriter::new);
            let mut tokens = BufWriter::new(atomic::create(path)?);
            tokens.write_all(&[0; HEADER as usize])?;
            Ok(Self {
                path: path.into(),
                header: Header {
                    format: FORMAT,
                    width: Width::for_vocabulary(tokenizer.vocab_size()),
                    tokens: 0,
                    has_mask: false,
                    documents: 0,
                    tokenizer: tokenizer.fingerprint(),
                },
                begin: 0,
                tokens,
                mask: beside()?,
                bits: vec![],
                starts: beside()?,
            })
        };
        create().with_context(cannot_write(path))
    }

    /// Writes the next part of a document. Documents without tokens are not listed.
    pub(super) fn push(&mut self, part: &Tokenized) -> Result<()> {
        self.write(part).with_context(cannot_write(&self.path))
    }

    fn write(&mut self, Tokenized { ids, mask, ends, .. }: &Tokenized) -> io::Result<()> {
        self.tokens.write_all(&self.header.width.encode(ids))?;
        self.bits.extend((0..ids.len()).map(|i| mask.as_ref().is_none_or(|mask| mask[i])));
        let whole = self.bits.len() / 8 * 8;
        self.mask.write_all(&packed(&self.bits[..whole]))?;
        self.bits.drain(..whole);
        self.header.has_mask |= mask.is_some();
        self.header.tokens += ids.len() as u64;
        if *ends && self.header.tokens > self.begin {
            self.starts.write_all(&self.begin.to_le_bytes())?;
            self.header.documents += 1;
            self.begin = self.header.tokens;
        }
        Ok(())
    }

    /// Writes the header, gives the file its name, and returns the header.
    pub(super) fn finish(self) -> Result<Header> {
        let Self { path, header, mut tokens, mut mask, bits, starts, .. } = self;
        let write = || -> io::Result<()> {
            if header.has_mask {
                mask.write_all(&packed(&bits))?;
                append(mask, &mut tokens)?;
            }
            append(starts, &mut tokens)?;
            tokens.rewind()?;
            tokens.write_all(&header.to_bytes()?)?;
            atomic::finish(tokens.into_inner().map_err(io::IntoInnerError::into_error)?, &path)
        };
        write().with_context(cannot_write(&path))?;
        Ok(header)
    }
}

/// Appends everything that was written to `from`.
fn append(mut from: BufWriter<File>, to: &mut impl Write) -> io::Result<()> {
    from.rewind()?;
    io::copy(from.get_mut(), to).map(drop)
}

/// Bits as bytes, lowest bit of a byte first.
fn packed(bits: &[bool]) -> Vec<u8> {
    let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (i, bit)| byte | u8::from(*bit) << i);
    bits.chunks(8).map(byte).collect()
}
