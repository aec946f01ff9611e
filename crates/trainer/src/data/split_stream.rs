//! [`Part`]: training or validation part of a token file, as one stream of tokens. It knows where
//! documents begin and which targets the loss counts.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::token_file::TokenFile;
use crate::{Tokenizer, atomic, files};

/// Tokens read at once to find documents.
const CHUNK: u64 = 1 << 16;

/// Stream of tokens.
#[derive(Debug)]
pub(super) struct Part {
    /// Length in tokens.
    pub(super) len: u64,
    /// Tokens that the loss counts; `None` if they were not counted.
    pub(super) targets: Option<u64>,
    /// Whether the first document began in the other part.
    pub(super) begins_within: bool,
    file: Arc<TokenFile>,
    /// Begin of each document in the part and in the file. Of a file that does not list documents,
    /// only the begin of the part.
    list: Vec<[u64; 2]>,
    /// BOS and EOS in a file that does not list documents. These begin with BOS; without a BOS they
    /// end with EOS.
    marks: Option<[Option<u32>; 2]>,
    /// File that keeps the begins of documents that were found by these tokens.
    memory: Option<PathBuf>,
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

impl Part {
    /// Splits a file into its training part and its validation part. The validation part has documents
    /// with the share `fraction` of the tokens. If the file does not list documents, it is the end
    /// of the file, and `memory` is the beginning of a path for what is found in it.
    pub(super) fn both(file: TokenFile, fraction: f64, tokenizer: &Tokenizer, memory: &Path) -> Result<[Self; 2]> {
        let (listed, file) = (file.documents()?, Arc::new(file));
        let Some(documents) = listed else {
            let (marks, all) = (Some([tokenizer.bos(), tokenizer.eos()]), file.len());
            let cut = all - (fraction * all as f64) as u64;
            let part = |first, len| {
                let targets = (!file.has_mask()).then_some(len);
                let memory = Some(memory.with_extension(format!("{first}-{len}.starts")));
                Self { len, targets, begins_within: false, file: file.clone(), list: vec![[0, first]], marks, memory }
            };
            return Ok([part(0, cut), part(cut, all - cut)]);
        };
        let (train, held_out, begins_within) = split(documents, fraction);
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
        let mut part = Self { len, targets: None, begins_within, file: file.clone(), list, marks: None, memory: None };
        part.targets = Some(part.count_targets(0..len)?);
        Ok(part)
    }

    /// Number of documents, including cut ones; `None` if they are not listed.
    pub(super) fn num_documents(&self) -> Option<u64> {
        self.marks.is_none().then_some(self.list.len() as u64)
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
        let tokens = &window.tokens;
        window.starts = match self.marks {
            None => {
                let starts = &self.list[self.list.partition_point(|[start, _]| *start < range.start)..];
                let starts = starts.iter().map(|[start, _]| *start).take_while(|start| *start < range.end);
                starts.map(|start| (start - range.start) as usize).collect()
            }
            Some([Some(bos), _]) => (0..tokens.len()).filter(|i| tokens[*i] == bos).collect(),
            Some([None, eos]) => {
                // The token before the window may end a document.
                let begin = self.list[0][1] + range.start;
                let before = if begin > 0 { self.file.read(begin - 1..begin)?.pop() } else { None };
                let before = |i: usize| if i == 0 { before } else { Some(tokens[i - 1]) };
                (0..tokens.len()).filter(|i| before(*i).is_none_or(|before| eos == Some(before))).collect()
            }
        };
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

    /// Index of the document that contains `place`, and the offset in it. Without listed documents
    /// there is no index, and the offset is in the file.
    pub(super) fn document_at(&self, place: u64) -> (Option<u64>, u64) {
        let document = self.list.partition_point(|[start, _]| *start <= place).saturating_sub(1);
        let [start, begin] = self.list[document];
        match self.marks {
            None => (Some(document as u64), place - start),
            Some(_) => (None, begin + place),
        }
    }

    /// Visits all documents in order, each as a range of tokens. The first document may have begun
    /// before this part.
    pub(super) fn each_document(&self, mut visit: impl FnMut(Range<u64>) -> Result<()>) -> Result<()> {
        let mut begin = 0;
        let mut boundary = |start: u64| match start > begin {
            true => visit(std::mem::replace(&mut begin, start)..start),
            false => Ok(()),
        };
        match self.marks {
            None => self.list.iter().try_for_each(|[start, _]| boundary(*start))?,
            Some(_) => self.marked_starts()?.into_iter().try_for_each(&mut boundary)?,
        }
        boundary(self.len)
    }

    /// Begins of the documents in a file that does not list them, from an earlier scan or by reading
    /// all of it.
    fn marked_starts(&self) -> Result<Vec<u64>> {
        let known = self.memory.as_ref().and_then(|memory| files::read(memory).ok());
        let known = known.map(|bytes| bytes.as_chunks().0.iter().map(|start| u64::from_le_bytes(*start)).collect());
        let is_valid = |starts: &Vec<u64>| starts.is_sorted() && starts.last().is_none_or(|last| *last < self.len);
        if let Some(starts) = known.filter(is_valid) {
            return Ok(starts);
        }
        let mut starts = vec![];
        for first in (0..self.len).step_by(CHUNK as usize) {
            let found = self.read(first..self.len.min(first + CHUNK))?.starts;
            starts.extend(found.into_iter().map(|start| first + start as u64));
        }
        if let Some(memory) = &self.memory {
            // Without it, the next start reads the file again.
            let _ = atomic::replace(memory, &starts.iter().flat_map(|start| start.to_le_bytes()).collect::<Vec<_>>());
        }
        Ok(starts)
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
