//! [`TokenWriter`]: writes documents of any length to a token file as they arrive.

use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

use super::cannot_write;
use super::encode::Tokenized;
use super::token_file::{HEADER, Header, Width};
use crate::{Tokenizer, atomic};

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
                    width: Width::for_vocabulary(tokenizer.vocab_size()),
                    tokens: 0,
                    has_mask: false,
                    documents: Some(0),
                    tokenizer: Some(tokenizer.fingerprint()),
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
            self.header.documents = self.header.documents.map(|documents| documents + 1);
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
