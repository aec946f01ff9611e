//! Which documents of a token file are trained on, and which are held out, as two lists in the cache: of each document where it begins in
//! its part, and in the file.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::DataError;
use super::cache::entry;
use super::raw_file::Pairs;
use super::token_file::TokenFile;

/// How much is in a part of a token file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartSize {
    pub(super) tokens: u64,
    /// Documents, and ends and beginnings of some; unknown where they are not listed.
    pub(super) documents: Option<u64>,
    /// Tokens that the loss counts; unknown where nobody has counted them.
    pub(super) targets: Option<u64>,
    /// The first document has begun in the other part.
    pub(super) begins_within: bool,
}

/// The list of the documents that are trained on, and that of those that are held out.
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
    // Few documents, or only large ones: the end of the training stream makes up for it.
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

/// Gives each document, and whether it is held out: that is when what is held out is behind its share by the document's length or more.
/// Returns how many tokens are trained on, and how many are held out.
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

/// A list of documents that is being written.
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

    /// One without a token is none.
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
