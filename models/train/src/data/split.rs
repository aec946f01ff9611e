//! Splits the documents of a token file into training and held-out documents. Two lists in the
//! cache give where each document begins, in its part and in the file.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::DataError;
use super::cache::entry;
use super::raw_file::Pairs;
use super::token_file::TokenFile;

/// Size of a part of a token file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartSize {
    pub(super) tokens: u64,
    /// Documents, including cut ones; `None` if they are not listed.
    pub(super) documents: Option<u64>,
    /// Tokens that the loss counts; `None` if they were not counted.
    pub(super) targets: Option<u64>,
    /// Whether the first document began in the other part.
    pub(super) begins_within: bool,
}

/// Lists of the training documents and of the held-out documents.
pub(super) fn split(
    file: &TokenFile,
    fraction: f64,
    name: &str,
    of: &str,
    cache: &Path,
) -> Result<[(PathBuf, PartSize); 2], DataError> {
    let names = ["train", "held_out"];
    let cached = entry(cache, &format!("{name}-split"), of, |folder| {
        let [train, held_out] = names.map(|name| List::create(folder.join(name), file));
        let (mut train, mut held_out) = (train?, held_out?);
        write(file, fraction, &mut train, &mut held_out)?;
        Ok([train.finish()?, held_out.finish()?])
    })?;
    let [train, held_out] = names.map(|name| cached.folder.join(name));
    let [train_size, held_out_size] = cached.manifest;
    Ok([(train, train_size), (held_out, held_out_size)])
}

fn write(file: &TokenFile, fraction: f64, train: &mut List<'_>, held_out: &mut List<'_>) -> Result<(), DataError> {
    let [all, held] = deal(file, fraction, |_, _| Ok(()))?;
    let wanted = (fraction * (all + held) as f64) as u64;
    // With few documents, or only large ones, the end of the training stream is held out too.
    let cut = if held * 2 < wanted { all - (wanted - held) } else { all };
    deal(file, fraction, |is_held_out, document| match is_held_out {
        true => held_out.push(document),
        false => train.push(document.start..document.end.min(document.start + (cut - train.size.tokens))),
    })?;
    let mut passed = 0;
    deal(file, fraction, |is_held_out, document| {
        let begin = document.start + cut.saturating_sub(passed);
        passed += if is_held_out { 0 } else { document.end - document.start };
        if is_held_out || begin >= document.end {
            return Ok(());
        }
        held_out.size.begins_within |= begin > document.start;
        held_out.push(begin..document.end)
    })?;
    Ok(())
}

/// Visits each document, with whether it is held out. A document is held out if the held-out tokens
/// are behind their share by at least its length. Returns the number of training tokens and of
/// held-out tokens.
fn deal(
    file: &TokenFile,
    fraction: f64,
    mut visit: impl FnMut(bool, Range<u64>) -> Result<(), DataError>,
) -> Result<[u64; 2], DataError> {
    let [mut train, mut held_out] = [0; 2];
    file.each_document(|document| {
        let len = document.end - document.start;
        let behind = fraction * (train + held_out + len) as f64 - held_out as f64;
        let is_held_out = len as f64 <= behind;
        *(if is_held_out { &mut held_out } else { &mut train }) += len;
        visit(is_held_out, document)
    })?;
    Ok([train, held_out])
}

/// List of documents that is being written.
struct List<'a> {
    pairs: Pairs,
    file: &'a TokenFile,
    size: PartSize,
}

impl<'a> List<'a> {
    fn create(path: PathBuf, file: &'a TokenFile) -> Result<Self, DataError> {
        let size = PartSize { tokens: 0, documents: Some(0), targets: Some(0), begins_within: false };
        Ok(Self { pairs: Pairs::create(path)?, file, size })
    }

    /// Adds a document, unless it is empty.
    fn push(&mut self, document: Range<u64>) -> Result<(), DataError> {
        if document.is_empty() {
            return Ok(());
        }
        let PartSize { tokens, documents, targets, .. } = self.size;
        self.pairs.push([tokens, document.start])?;
        let counted = self.file.count_targets(document.clone())?;
        self.size = PartSize {
            tokens: tokens + (document.end - document.start),
            documents: documents.map(|documents| documents + 1),
            targets: targets.map(|targets| targets + counted),
            ..self.size
        };
        Ok(())
    }

    fn finish(self) -> Result<PartSize, DataError> {
        self.pairs.finish()?;
        Ok(self.size)
    }
}
