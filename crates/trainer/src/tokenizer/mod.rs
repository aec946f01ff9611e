//! [`Tokenizer`]: converts text to token ids and back, in the formats of checkpoints.

mod added;
mod bytes;
mod config;
mod hugging_face;
mod limits;
mod stream;
mod tiktoken;
mod words;

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};

pub use bytes::ByteTokenizer;
use config::Marks;
pub(crate) use config::{ConfigFile, SPECIAL_TOKENS};
use hugging_face::HuggingFace;
pub use stream::TextStream;
use tiktoken::Tiktoken;

use crate::digest::{Fingerprint, hex};
use crate::files::{self, LFS_POINTER, is_lfs_pointer};

/// How the name of a special token in a text is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialTokens {
    /// As text, letter by letter: right for untrusted text.
    #[default]
    AreText,
    /// As the token: right for templates.
    InText,
}

/// Maps text to token ids and back.
///
/// ```
/// use trainer::{SpecialTokens, Tokenizer};
///
/// let tokenizer = Tokenizer::bytes();
/// let ids = tokenizer.encode("né", SpecialTokens::AreText)?;
/// assert_eq!(ids, [0x6e, 0xc3, 0xa9]);
/// assert_eq!(tokenizer.decode(&ids)?, "né");
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Tokenizer {
    kind: Kind,
    /// Path of its file, or `bytes`.
    path: PathBuf,
    marks: Marks,
    /// SHA-256 of the file and of the tokens added to it.
    digest: String,
    /// Vocabulary size of the model, if it is smaller.
    limit: Option<usize>,
}

enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
    Tiktoken(Box<Tiktoken>),
}

impl Tokenizer {
    /// Name of [`Tokenizer::bytes`] in [`open`](Self::open) and [`format`](Self::format).
    pub const BYTES: &'static str = "bytes";

    /// Byte-level tokenizer, see [`ByteTokenizer`].
    pub fn bytes() -> Self {
        Self {
            kind: Kind::Bytes,
            path: Self::BYTES.into(),
            marks: Marks { bos: Some(ByteTokenizer::BOS), ..Marks::default() },
            digest: String::new(),
            limit: None,
        }
    }

    /// Reads the tokenizer of a checkpoint: `folder/tokenizer.json` (Hugging Face), else
    /// `folder/tokenizer.model` (Llama 3's ranks). The tokens that begin and end a text come from
    /// `tokenizer_config.json` and `generation_config.json`, if present.
    ///
    /// # Errors
    /// A file that is missing, or is not a tokenizer.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let file = ["tokenizer.json", "tokenizer.model"].map(|name| folder.join(name)).into_iter().find(|f| f.exists());
        let none = || format!("{} has neither tokenizer.json nor tokenizer.model", folder.display());
        Self::from_file(file.with_context(none)?)
    }

    /// Reads a `.json` file in Hugging Face's format, or else Llama 3's ranks. The files next to it
    /// are read as in [`from_folder`](Self::from_folder).
    ///
    /// # Errors
    /// A file that is missing, or is not a tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = files::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(!is_lfs_pointer(&bytes), "{}: {LFS_POINTER}", path.display());
        let mut digest = hex(Sha256::new_with_prefix(&bytes));
        let (kind, own) = if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
            let tokenizer = HuggingFace::from_bytes(&bytes, path)?;
            let own = Marks { bos: tokenizer.first(), ..Marks::default() };
            if !tokenizer.added().is_empty() {
                digest = Fingerprint::default().field(&digest).field(format!("{:?}", tokenizer.added())).hex();
            }
            (Kind::HuggingFace(Box::new(tokenizer)), own)
        } else {
            let tokenizer = Tiktoken::from_bytes(bytes, path)?;
            let id = |name| tokenizer.id(name);
            let stop = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"].into_iter().filter_map(id).collect();
            let own = Marks { bos: id("<|begin_of_text|>"), eos: id("<|end_of_text|>"), stop };
            (Kind::Tiktoken(Box::new(tokenizer)), own)
        };
        let mut tokenizer = Self { kind, path: path.into(), marks: Marks::default(), digest, limit: None };
        tokenizer.marks = own.with_files_beside(path, tokenizer.vocab_size(), |name| tokenizer.id_of(name))?;
        Ok(tokenizer)
    }

    /// Limits this tokenizer to a model with `vocab_size` tokens. A text with another token is an
    /// error.
    ///
    /// # Errors
    /// A BOS that the model lacks.
    pub fn for_vocabulary(mut self, vocab_size: usize) -> Result<Self> {
        if vocab_size < self.own_size() {
            self.limit = Some(vocab_size);
            self.check_mark("bos_token", self.marks.bos)?;
            self.marks.stop.retain(|id| (*id as usize) < vocab_size);
        }
        Ok(self)
    }

    /// Vocabulary size of the model, if it is smaller than the tokenizer's.
    pub(crate) fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// Returns the ids if the model has all of them.
    fn within_limit(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        let vocab_size = self.vocab_size();
        let Some(at) = ids.iter().position(|id| *id as usize >= vocab_size) else { return Ok(ids) };
        let around = &ids[at.saturating_sub(8)..ids.len().min(at + 8)];
        let (id, token, text) = (ids[at], self.decode(&ids[at..=at])?, self.decode(around)?);
        bail!("token {id} ({token:?}) in {text:?} is none of the model, whose vocabulary has {vocab_size}")
    }

    /// Checks that the model has this BOS or EOS.
    fn check_mark(&self, key: &'static str, mark: Option<u32>) -> Result<()> {
        let vocab_size = self.vocab_size();
        let Some(id) = mark.filter(|id| *id as usize >= vocab_size) else { return Ok(()) };
        let (path, token) = (self.path.display(), self.decode(&[id])?);
        let problem = format!("none of the model, whose vocabulary has {vocab_size}");
        bail!("{path}: {key} of each text is token {id} ({token:?}), which is {problem}")
    }

    /// Opens a tokenizer by name: `bytes`, a folder as for [`from_folder`](Self::from_folder), or a
    /// file as for [`from_file`](Self::from_file).
    ///
    /// # Errors
    /// A file that is missing, or is not a tokenizer.
    pub fn open(name: &str) -> Result<Self> {
        match name {
            Self::BYTES => Ok(Self::bytes()),
            path if Path::new(path).is_dir() => Self::from_folder(path),
            path => Self::from_file(path),
        }
    }

    /// File name of the format, or `bytes`.
    pub fn format(&self) -> &'static str {
        match &self.kind {
            Kind::Bytes => Self::BYTES,
            Kind::HuggingFace(_) => "tokenizer.json",
            Kind::Tiktoken(_) => "tokenizer.model",
        }
    }

    /// SHA-256, in hexadecimal, over everything that decides the ids of
    /// [`document`](Self::document): the format, the file, BOS and EOS.
    pub fn fingerprint(&self) -> String {
        let mark = |mark: Option<u32>| mark.map_or(u64::MAX, u64::from);
        let fingerprint = Fingerprint::default().field(self.format()).field(&self.digest);
        fingerprint.number(mark(self.marks.bos)).number(mark(self.marks.eos)).hex()
    }

    /// One more than the largest id, or the [model's vocabulary](Self::for_vocabulary) if it is
    /// smaller.
    pub fn vocab_size(&self) -> usize {
        self.limit.unwrap_or_else(|| self.own_size())
    }

    fn own_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => ByteTokenizer::VOCAB_SIZE,
            Kind::HuggingFace(tokenizer) => tokenizer.vocab_size(),
            Kind::Tiktoken(tokenizer) => tokenizer.vocab_size(),
        }
    }

    /// Number of ids from 0 that a model may generate: all except the byte tokenizer's `BOS`.
    pub fn num_choices(&self) -> usize {
        match &self.kind {
            Kind::Bytes => ByteTokenizer::NUM_BYTES.min(self.vocab_size()),
            _ => self.vocab_size(),
        }
    }

    /// Token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.marks.bos
    }

    /// Token that ends a document, if the model has it.
    pub fn eos(&self) -> Option<u32> {
        self.marks.eos.filter(|id| (*id as usize) < self.vocab_size())
    }

    /// Tokens that end generation.
    pub fn stop(&self) -> &[u32] {
        &self.marks.stop
    }

    /// Encodes `text` without BOS and EOS.
    ///
    /// # Errors
    /// Text that the tokenizer refuses or the model's vocabulary lacks. Plain text of documents, if
    /// the model lacks the EOS that ends them.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>> {
        if special == SpecialTokens::AreText {
            self.check_mark("eos_token", self.marks.eos)?;
        }
        self.encode_part(text, special)
    }

    /// Same as [`encode`](Self::encode), but the model may lack the EOS.
    fn encode_part(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>> {
        let ids = match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(tokenizer) => tokenizer.encode(text, special),
            Kind::Tiktoken(tokenizer) => tokenizer.encode(text, special),
        };
        self.within_limit(ids.map_err(|reason| cannot_encode(text, reason))?)
    }

    /// Ids of `text` with [`SpecialTokens::InText`], and the bytes of the text for each id. The
    /// ranges have no gaps: white space that the tokenizer skips belongs to the next token. Tokens
    /// that share a character have all of it.
    pub(crate) fn encode_with_ranges(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        if let Kind::HuggingFace(tokenizer) = &self.kind {
            let (ids, ranges) = tokenizer.encode_with_ranges(text).map_err(|reason| cannot_encode(text, reason))?;
            return Ok((self.within_limit(ids)?, ranges));
        }
        let ids = self.encode(text, SpecialTokens::InText)?;
        let mut end = 0;
        let range = |id: &u32| {
            let start = end;
            end += match &self.kind {
                Kind::Tiktoken(tokenizer) => tokenizer.bytes(*id).map_or(0, |bytes| bytes.len()),
                _ => 1,
            };
            start..end
        };
        let ranges = ids.iter().map(range).collect();
        Ok((ids, ranges))
    }

    /// Whether `id` is a special token.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        match &self.kind {
            Kind::Bytes => id == ByteTokenizer::BOS,
            Kind::HuggingFace(tokenizer) => tokenizer.is_special(id),
            Kind::Tiktoken(tokenizer) => tokenizer.is_special(id),
        }
    }

    /// Encodes a text for a model to continue: BOS, if there is one, and the text. Special tokens
    /// in it are text.
    ///
    /// # Errors
    /// Text that the tokenizer refuses or the model's vocabulary lacks.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let text = self.encode_part(text, SpecialTokens::AreText)?;
        Ok(self.bos().into_iter().chain(text).collect())
    }

    /// Encodes a whole text: [`prompt`](Self::prompt), then EOS if there is one.
    ///
    /// # Errors
    /// Same as [`encode`](Self::encode).
    pub fn document(&self, text: &str) -> Result<Vec<u32>> {
        self.check_mark("eos_token", self.marks.eos)?;
        let mut ids = self.prompt(text)?;
        ids.extend(self.eos());
        Ok(ids)
    }

    /// Decodes `ids`. Special tokens become their names, except the byte tokenizer's, which has no
    /// name. Bytes that are not UTF-8 become `�`.
    ///
    /// # Errors
    /// An id outside the vocabulary, or ids that the decoder refuses.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, false)
    }

    /// Same as [`decode`](Self::decode), optionally without special tokens.
    fn decode_with(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        // Unused ids below this size decode to no text, as in the original.
        let size = self.own_size();
        if let Some(id) = ids.iter().find(|id| **id as usize >= size) {
            bail!("{id} is no token: the tokenizer has ids below {size}");
        }
        let bytes: Vec<u8> = match &self.kind {
            Kind::HuggingFace(tokenizer) => return tokenizer.decode(ids, skip_special),
            Kind::Tiktoken(tokenizer) => {
                let ids = ids.iter().filter(|id| !skip_special || !tokenizer.is_special(**id));
                ids.flat_map(|id| tokenizer.bytes(*id).unwrap_or_default()).collect()
            }
            // BOS is not a byte.
            Kind::Bytes => ids.iter().flat_map(|id| u8::try_from(*id)).collect(),
        };
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Decodes ids one after another, like [`decode`](Self::decode), without splitting a character.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self, false)
    }

    /// Same as [`stream`](Self::stream), without special tokens: the text for a reader.
    pub fn stream_text(&self) -> TextStream<'_> {
        TextStream::new(self, true)
    }

    /// Same as [`stream_text`](Self::stream_text), for ids that follow `prompt`. Some decoders
    /// remove the first space of a text, but an answer does not begin the text.
    ///
    /// # Errors
    /// An id outside the vocabulary, or ids that the decoder refuses.
    pub fn stream_text_after(&self, prompt: &[u32]) -> Result<TextStream<'_>> {
        let mut stream = self.stream_text();
        prompt.iter().try_for_each(|id| stream.push(*id).map(drop))?;
        Ok(stream)
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.id(token),
            Kind::Tiktoken(tokenizer) => tokenizer.id(token),
        }
    }
}

fn cannot_encode(text: &str, reason: anyhow::Error) -> anyhow::Error {
    let text: String = text.chars().take(40).collect();
    anyhow!("cannot tokenize {text:?}: {reason}")
}

impl core::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let mut f = f.debug_struct("Tokenizer");
        f.field("format", &self.format()).field("vocab_size", &self.vocab_size()).field("marks", &self.marks).finish()
    }
}

/// Error of a file that the library cannot read.
fn not_valid(path: &Path, reason: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{} is no tokenizer of Hugging Face's format: {reason}", path.display())
}
