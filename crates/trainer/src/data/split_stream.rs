//! [`StreamPart`]: training or validation part of a token file, as one stream of tokens. It knows where
//! documents begin and which targets the loss counts.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

use super::token_file::TokenFile;

/// Stream of tokens.
#[derive(Debug)]
pub(super) struct StreamPart {
    /// Length in tokens.
    pub(super) len: u64,
    /// Number of tokens that the loss counts.
    pub(super) targets: u64,
    /// Whether the first document began in the other part.
    pub(super) begins_within: bool,
    file: Arc<TokenFile>,
    /// Begin of each document in the part and in the file.
    list: Vec<[u64; 2]>,
}

/// Range of a stream.
#[derive(Default)]
pub(super) struct Window {
    pub(super) tokens: Vec<u32>,
    /// Positions in `tokens` at which documents begin.
    pub(super) starts: Vec<usize>,
    /// Whether the loss counts each token as a target.
    pub(super) mask: Option<Vec<bool>>,
}

impl StreamPart {
    /// Splits a file into its training part and its validation part. The validation part has documents
    /// with the share `fraction` of the tokens.
    pub(super) fn both(file: TokenFile, fraction: f64) -> Result<[Self; 2]> {
        let (train, held_out, begins_within) = split(file.documents()?, fraction);
        let file = Arc::new(file);
        Ok([Self::of(&file, train, false)?, Self::of(&file, held_out, begins_within)?])
    }

    /// Part with these ranges of a file.
    fn of(file: &Arc<TokenFile>, documents: Vec<Range<u64>>, begins_within: bool) -> Result<Self> {
        let mut len = 0;
        let begin = |document: Range<u64>| {
            len += document.end - document.start;
            [len - (document.end - document.start), document.start]
        };
        let list = documents.into_iter().map(begin).collect();
        let mut part = Self { len, targets: 0, begins_within, file: file.clone(), list };
        part.targets = part.count_targets(0..len)?;
        Ok(part)
    }

    /// Number of documents, including cut ones.
    pub(super) fn num_documents(&self) -> u64 {
        self.list.len() as u64
    }

    pub(super) fn has_mask(&self) -> bool {
        self.file.has_mask()
    }

    /// Number of tokens in `range` that the loss counts.
    pub(super) fn count_targets(&self, range: Range<u64>) -> Result<u64> {
        self.runs(range).into_iter().map(|run| self.file.count_targets(run)).sum()
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Window> {
        let mut window = Window::default();
        for run in self.runs(range.clone()) {
            window.tokens.extend(self.file.read(run.clone())?);
            if let Some(mask) = self.file.read_mask(run)? {
                window.mask.get_or_insert_default().extend(mask);
            }
        }
        let starts = &self.list[self.list.partition_point(|[start, _]| *start < range.start)..];
        let starts = starts.iter().map(|[start, _]| *start).take_while(|start| *start < range.end);
        window.starts = starts.map(|start| (start - range.start) as usize).collect();
        Ok(window)
    }

    /// Ranges of the file that hold a range of the stream. Documents that follow each other in the
    /// file are one range.
    fn runs(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (list, mut runs) = (&self.list, Vec::<Range<u64>>::new());
        let first = list.partition_point(|[start, _]| *start <= range.start).saturating_sub(1);
        for (i, [start, begin]) in list.iter().enumerate().skip(first).take_while(|(_, [start, _])| *start < range.end)
        {
            let end = list.get(i + 1).map_or(range.end, |[next, _]| range.end.min(*next));
            let run = begin + range.start.saturating_sub(*start)..begin + (end - start);
            match runs.last_mut().filter(|last| last.end == run.start) {
                Some(last) => last.end = run.end,
                None => runs.push(run),
            }
        }
        runs
    }

    /// Index of the document that contains `place`, and the offset in it.
    pub(super) fn document_at(&self, place: u64) -> (u64, u64) {
        let document = self.list.partition_point(|[start, _]| *start <= place).saturating_sub(1);
        (document as u64, place - self.list[document][0])
    }

    /// Visits all documents in order, each as a range of tokens. The first document may have begun
    /// before this part.
    pub(super) fn each_document(&self, mut visit: impl FnMut(Range<u64>) -> Result<()>) -> Result<()> {
        let ends = self.list.iter().skip(1).map(|[start, _]| *start).chain([self.len]);
        self.list.iter().zip(ends).try_for_each(|([start, _], end)| visit(*start..end))
    }
}

/// Training documents, validation documents, and whether the first of these began in the other part.
fn split(documents: Vec<Range<u64>>, fraction: f64) -> (Vec<Range<u64>>, Vec<Range<u64>>, bool) {
    let (mut train, mut held_out) = (vec![], vec![]);
    let (mut all, mut held) = (0, 0);
    for document in documents {
        let len = document.end - document.start;
        all += len;
        // A document is held out if the validation tokens are behind their share by its length.
        let behind = fraction * all as f64 - held as f64;
        if len as f64 <= behind {
            held += len;
            held_out.push(document);
        } else {
            train.push(document);
        }
    }
    let wanted = (fraction * all as f64) as u64;
    // With few documents, or only large ones, the end of the training stream is held out too.
    let mut missing = if held * 2 < wanted { wanted - held } else { 0 };
    let (whole, mut begins_within) = (held_out.len(), false);
    while let Some(document) = train.pop_if(|_| missing > 0) {
        let begin = document.end - missing.min(document.end - document.start);
        missing -= document.end - begin;
        if begin > document.start {
            train.push(document.start..begin);
            begins_within = true;
        }
        held_out.push(begin..document.end);
    }
    held_out[whole..].reverse();
    (train, held_out, begins_within)
}
