//! Token streams to sequences of one length: windows of the stream, or whole documents.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataError;
use super::cache::entry;
use super::part::Part;
use super::raw_file::{Pairs, RawFile};

/// How documents become sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents one after another, cut where a sequence is full: no padding but in the last one.
    Wrapped,
    /// Documents that fit into what is left of a sequence follow each other, then comes padding; only documents that are longer than
    /// a sequence are cut.
    Whole,
}

/// Tokens to train on: token `t` is the input whose target is token `t + 1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// `seq_len + 1` tokens.
    pub tokens: Vec<u32>,
    /// For each of the `seq_len` targets whether its loss counts, which it never does for padding; all count if absent. It may be that
    /// none does: in a part of a long conversation in which the assistant says nothing.
    pub loss_mask: Option<Vec<bool>>,
    /// Places in `tokens` at which documents begin, ascending. Where place 0 is not one of them, the first document has begun in
    /// another sequence. A target at one of these places is predicted from the end of another document.
    pub document_starts: Vec<usize>,
    /// How many of `tokens` are not padding.
    pub num_tokens: usize,
}

/// A part as sequences.
#[derive(Debug)]
pub(super) struct Sequences {
    part: Arc<Part>,
    layout: Layout,
    count: u64,
    /// Documents that were to stay whole but are longer than a sequence.
    cut: u64,
    seq_len: usize,
    padding: u32,
}

#[derive(Debug)]
enum Layout {
    /// Windows, each of which begins with the last token of the one before.
    Windows,
    /// The range of each sequence, as two numbers.
    Ranges(RawFile),
}

/// What an index says of itself.
#[derive(Serialize, Deserialize)]
struct IndexSize {
    sequences: u64,
    cut: u64,
}

const INDEX: &str = "ranges";

impl Sequences {
    /// Every target once; the last sequence may have padding.
    pub(super) fn windows(part: Arc<Part>, seq_len: usize, padding: u32) -> Self {
        let count = part.len().saturating_sub(1).div_ceil(seq_len as u64);
        Self { part, layout: Layout::Windows, count, cut: 0, seq_len, padding }
    }

    /// Whole documents, by an index in `cache`.
    pub(super) fn whole(part: Arc<Part>, seq_len: usize, padding: u32, cache: &Path) -> Result<Self, DataError> {
        let name = format!("{}-whole-{seq_len}", part.fingerprint);
        let index = entry(cache, &name, |folder| {
            let (mut ranges, mut sequences) = (Pairs::create(folder.join(INDEX))?, 0);
            let cut = pack(&part, seq_len as u64, |range| {
                sequences += 1;
                ranges.push([range.start, range.end])
            })?;
            ranges.finish()?;
            Ok(IndexSize { sequences, cut })
        })?;
        let layout = Layout::Ranges(RawFile::open(&index.folder.join(INDEX))?);
        let IndexSize { sequences, cut } = index.manifest;
        Ok(Self { part, layout, count: sequences, cut, seq_len, padding })
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// How many sequences have no padding that a window would have; all of whole documents.
    pub(super) fn full(&self) -> u64 {
        match self.layout {
            Layout::Windows => self.part.len().saturating_sub(1) / self.seq_len as u64,
            Layout::Ranges(_) => self.count,
        }
    }

    /// Documents that were to stay whole but are longer than a sequence.
    pub(super) fn cut(&self) -> u64 {
        self.cut
    }

    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// Which tokens of the part sequence `i` has.
    pub(super) fn range(&self, i: u64) -> Result<Range<u64>, DataError> {
        match &self.layout {
            Layout::Windows => {
                let begin = i * self.seq_len as u64;
                Ok(begin..self.part.len().min(begin + self.seq_len as u64 + 1))
            }
            Layout::Ranges(index) => {
                let [begin, end] = index.pairs(i, 1)?[0];
                Ok(begin..end)
            }
        }
    }

    pub(super) fn sequence(&self, i: u64) -> Result<Sequence, DataError> {
        let window = self.part.read(self.range(i)?)?;
        let mut tokens = window.tokens;
        let num_tokens = tokens.len();
        let is_padded = num_tokens <= self.seq_len;
        let loss_mask = (is_padded || window.mask.is_some()).then(|| {
            let mut counts = window.mask.unwrap_or_else(|| vec![true; num_tokens]);
            counts.resize(self.seq_len + 1, false);
            counts.split_off(1)
        });
        tokens.resize(self.seq_len + 1, self.padding);
        Ok(Sequence { tokens, loss_mask, document_starts: window.starts, num_tokens })
    }
}

/// Next-fit: a document that does not fit into what is left of a sequence begins another one. Of a document that is longer than a
/// sequence, each piece begins with the last token of the one before, so that every token but the first is a target.
/// Gives how many such documents there are.
fn pack(
    part: &Part,
    seq_len: u64,
    mut emit: impl FnMut(Range<u64>) -> Result<(), DataError>,
) -> Result<u64, DataError> {
    let (mut open, mut cut) = (0..0, 0);
    part.each_document(|document| {
        if document.end - open.start > seq_len + 1 {
            if !open.is_empty() {
                emit(open.clone())?;
            }
            open.start = document.start;
            cut += u64::from(document.end - document.start > seq_len + 1);
            while document.end - open.start > seq_len + 1 {
                emit(open.start..open.start + seq_len + 1)?;
                open.start += seq_len;
            }
        }
        open.end = document.end;
        Ok(())
    })?;
    if !open.is_empty() {
        emit(open)?;
    }
    Ok(cut)
}
