//! First stage: tokenizes the documents of a source into a token file, in parallel, in the order of
//! the files. Only a bounded part is in memory.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use anyhow::{Result, bail, ensure};
use rayon::prelude::*;

use super::encode::{Encoder, Work};
use super::scan::FileState;
use super::token_file::{Header, TokenFile, TokenWriter, Tokenized};
use super::{DataSource, Format, LeftOut, readers};
use crate::folder::create_folder;
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// Name of the token file in its folder.
pub(super) const TOKENS: &str = "tokens.bin";
/// Bytes of text and documents per batch. A document needs memory in addition to its text.
const BATCH_BYTES: u64 = 8 << 20;
const BATCH_DOCUMENTS: usize = 8192;
/// Tokens after which a displayed text is cut.
const MAX_SHOWN: usize = 1 << 16;

/// Result of tokenizing a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizedSource {
    /// Number of files read.
    pub files: usize,
    /// Skipped files, by reason.
    pub left_out: LeftOut,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of documents.
    pub documents: u64,
}

/// Files of a source without token files, and the skipped ones.
fn select_text(source: &DataSource) -> Result<(Vec<FileState>, LeftOut)> {
    let selection = source.select(None)?;
    if let Some(file) = selection.files.iter().find(|file| file.format == Format::Bin) {
        bail!("{} holds tokens already: give text to tokenize", file.path.display());
    }
    Ok((selection.files, selection.left))
}

/// Tokenizes `source` into a file in the folder `to`, which must be empty or missing. A source with
/// the path of this folder or file trains like `source`, with the same tokenizer.
///
/// `template` renders `messages`. `progress` is called while tokenizing.
///
/// # Errors
/// Token files in `source`, an occupied folder, and any error of
/// [`Dataset::open`](super::Dataset::open).
pub fn tokenize_source(
    source: &DataSource,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    to: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<TokenizedSource> {
    let (files, left_out) = select_text(source)?;
    let encoder = Encoder { tokenizer, template, field: &source.field };
    let header = create_folder(to, |folder| tokenize(&files.iter().collect::<Vec<_>>(), &encoder, folder, progress))?;
    Ok(TokenizedSource { files: files.len(), left_out, tokens: header.tokens, documents: header.documents })
}

/// Document in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizedDocument {
    /// Ids of its tokens.
    pub ids: Vec<u32>,
    /// Whether the loss counts each token.
    pub is_target: Vec<bool>,
}

/// First `count` documents of `source`, as in training. Long text files are cut after about 65,536
/// tokens. `template` renders `messages`.
///
/// # Errors
/// Same as [`tokenize_source`].
pub fn first_documents(
    source: &DataSource,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    count: usize,
) -> Result<Vec<TokenizedDocument>> {
    let encoder = Encoder { tokenizer, template, field: &source.field };
    let (mut documents, mut open) = (vec![], TokenizedDocument::default());
    for file in &select_text(source)?.0 {
        for work in readers::read(file, &encoder)? {
            let work = work?;
            let part = encoder.encode(&work)?;
            open.is_target.extend(part.mask.unwrap_or_else(|| vec![true; part.ids.len()]));
            open.ids.extend(part.ids);
            if part.ends || open.ids.len() > MAX_SHOWN {
                // Nothing predicts the first token.
                open.is_target.iter_mut().take(1).for_each(|first| *first = false);
                documents.push(std::mem::take(&mut open));
            }
            if documents.len() >= count {
                return Ok(documents);
            }
        }
    }
    Ok(documents)
}

/// Checks what can be known of `source` before it is scanned: its paths, and the first document or
/// the header of each file that it names.
///
/// # Errors
/// As [`first_documents`].
pub fn check_source(source: &DataSource, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<()> {
    let encoder = Encoder { tokenizer, template, field: &source.field };
    for file in source.named_files()? {
        match (file.format, readers::read(&file, &encoder)?.next()) {
            (Format::Bin, _) => drop(TokenFile::open(&file.path, 0, tokenizer)?),
            (_, Some(work)) => drop(encoder.encode(&work?)?),
            (_, None) => {}
        }
    }
    Ok(())
}

/// Writes the tokens of `files` to a file in `folder` and returns its header. Files that changed
/// since they were scanned are an error.
pub(super) fn tokenize(
    files: &[&FileState],
    encoder: &Encoder<'_>,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Header> {
    let mut writer = TokenWriter::create(&folder.join(TOKENS), encoder.tokenizer)?;
    let mut done = Progress { bytes: 0, total_bytes: files.iter().map(|file| file.taken).sum() };
    // The next batch is read while this one is tokenized.
    let written = thread::scope(|scope| {
        let (send, batches) = mpsc::sync_channel(1);
        scope.spawn(move || read(files, encoder, &send));
        for batch in batches {
            let batch: Vec<Work<'_>> = batch?;
            let tokenized = encode(&batch, encoder);
            for (work, part) in batch.iter().zip(tokenized) {
                writer.push(&part?)?;
                done.bytes += work.bytes;
            }
            progress(done);
        }
        writer.finish()
    });
    // Checked before `written`: a change may be the cause of its error.
    files.iter().try_for_each(|file| file.check_unchanged())?;
    written
}

/// Tokenizes a batch up to the first document that fails. Documents after a failed one are skipped,
/// since they may be slow to fail too.
fn encode(batch: &[Work<'_>], encoder: &Encoder<'_>) -> Vec<Result<Tokenized>> {
    let failed = AtomicUsize::new(usize::MAX);
    let encode = |(i, work)| {
        if i > failed.load(Ordering::Relaxed) {
            return None;
        }
        let part = encoder.encode(work);
        if part.is_err() {
            failed.fetch_min(i, Ordering::Relaxed);
        }
        Some(part)
    };
    // Skipped documents always follow an error.
    batch.par_iter().enumerate().filter_map(encode).collect()
}

/// Sends the documents of the files in batches. A read error is sent after the documents before it,
/// since an earlier line may be wrong too and is the one to report.
fn read<'a>(files: &[&'a FileState], encoder: &Encoder<'a>, send: &SyncSender<Result<Vec<Work<'a>>>>) {
    let (mut batch, mut bytes) = (vec![], 0);
    let read = files.iter().try_for_each(|file| {
        for work in readers::read(file, encoder)? {
            let work = work?;
            bytes += work.bytes;
            batch.push(work);
            if bytes >= BATCH_BYTES || batch.len() >= BATCH_DOCUMENTS {
                bytes = 0;
                // The receiver is gone after an error, whose message nothing replaces.
                ensure!(send.send(Ok(std::mem::take(&mut batch))).is_ok(), "nothing receives the batch");
            }
        }
        Ok(())
    });
    let _ = send.send(Ok(batch));
    if let Err(error) = read {
        let _ = send.send(Err(error));
    }
}
