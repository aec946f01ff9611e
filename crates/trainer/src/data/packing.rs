//! Packs token streams into sequences of one length: windows of the stream, or whole documents.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::split_stream::StreamPart;

/// How documents are packed into sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents follow each other and are cut where a sequence is full. Only the last sequence is
    /// padded.
    Wrapped,
    /// Documents are kept whole. A document that does not fit into the rest of a sequence begins
    /// the next one, and the rest is padding. Only documents longer than a sequence are cut.
    Whole,
}

/// Training tokens: token `t` is the input whose target is token `t + 1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// `seq_len + 1` tokens.
    pub tokens: Vec<u32>,
    /// Whether the loss counts each of the `seq_len` targets. Padding never counts, and at least
    /// one target does. `None` counts all.
    pub loss_mask: Option<Vec<bool>>,
    /// Positions in `tokens` at which documents begin, ascending. Without position 0, the first
    /// document began in another sequence. A target at one of these positions is predicted from the
    /// end of another document.
    pub document_starts: Vec<usize>,
    /// Number of `tokens` that are not padding.
    pub num_tokens: usize,
}

/// Sequences of a part. Each has a target that counts.
#[derive(Debug)]
pub(super) struct Sequences {
    pub(super) part: Arc<StreamPart>,
    /// Begin and end of each sequence. `None` if the sequences are all windows of the part.
    ranges: Option<Vec<[u64; 2]>>,
    pub(super) size: SequencesSize,
    seq_len: usize,
    padding: u32,
}

/// Size of the sequences of a part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SequencesSize {
    pub(super) sequences: u64,
    /// Sequences that are skipped, since none of their targets counts.
    pub(super) without_targets: u64,
    /// Sequences that fill a window; with whole documents, all sequences.
    pub(super) full: u64,
    /// Tokens of these sequences, each counted once.
    pub(super) tokens: u64,
    /// Documents that are longer than a sequence and were to stay whole.
    pub(super) cut: u64,
}

impl Sequences {
    /// Makes the sequences of a part: windows, which have every target once, or whole documents.
    pub(super) fn new(part: Arc<StreamPart>, packing: Packing, seq_len: usize, padding: u32) -> Result<Self> {
        let (len, targets) = (seq_len as u64, part.len.saturating_sub(1));
        let count = targets.div_ceil(len);
        if packing == Packing::Wrapped && !part.has_mask() {
            let size = SequencesSize { sequences: count, full: targets / len, tokens: part.len, ..Default::default() };
            return Ok(Self { part, ranges: None, size, seq_len, padding });
        }
        let (mut ranges, mut size, mut end) = (vec![], SequencesSize::default(), 0);
        let emit = |range: Range<u64>| {
            if part.count_targets(range.start + 1..range.end)? == 0 {
                size.without_targets += 1;
                return Ok(());
            }
            size.sequences += 1;
            size.full += u64::from(packing == Packing::Whole || range.end - range.start > len);
            size.tokens += range.end - range.start.max(end);
            end = range.end;
            ranges.push([range.start, range.end]);
            Ok(())
        };
        let cut = match packing {
            Packing::Wrapped => (0..count).map(|i| window(&part, len, i)).try_for_each(emit).map(|()| 0),
            Packing::Whole => pack(&part, len, emit),
        }?;
        Ok(Self { part, ranges: Some(ranges), size: SequencesSize { cut, ..size }, seq_len, padding })
    }

    /// Range of tokens in the part of sequence `i`.
    pub(super) fn range(&self, i: u64) -> Range<u64> {
        match &self.ranges {
            None => window(&self.part, self.seq_len as u64, i),
            Some(ranges) => ranges[i as usize][0]..ranges[i as usize][1],
        }
    }

    pub(super) fn sequence(&self, i: u64) -> Result<Sequence> {
        let window = self.part.read(self.range(i))?;
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

/// Range of window `i`, which begins with the last token of the previous window.
fn window(part: &StreamPart, seq_len: u64, i: u64) -> Range<u64> {
    let begin = i * seq_len;
    begin..part.len.min(begin + seq_len + 1)
}

/// Packs by next-fit: a document that does not fit into the rest of a sequence begins another one.
///
/// A document longer than a sequence is cut. Each piece begins with the last token of the previous
/// one, so that every token except the first is a target. Returns the number of such documents.
fn pack(part: &StreamPart, seq_len: u64, mut emit: impl FnMut(Range<u64>) -> Result<()>) -> Result<u64> {
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
