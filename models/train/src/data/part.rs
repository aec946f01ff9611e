//! [`Part`]: training or held-out part of a token file, as one stream of tokens. It knows where
//! documents begin and which targets the loss counts.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::DataError;
use super::raw_file::RawFile;
use super::split::{PartSize, split};
use super::token_file::TokenFile;
use crate::Tokenizer;

/// Documents listed at once, and tokens read at once.
const CHUNK: u64 = 1 << 16;

/// Stream of tokens.
#[derive(Debug)]
pub(super) struct Part {
    /// Digest of everything that decides its content.
    pub(super) fingerprint: String,
    pub(super) size: PartSize,
    /// Data it was made from, for display.
    pub(super) of: String,
    file: Arc<TokenFile>,
    documents: Documents,
}

#[derive(Debug)]
enum Documents {
    /// List of where each document begins, in the part and in the file.
    Listed(RawFile),
    /// Begins at token `first` of the file. Documents begin with BOS; without a BOS they end with
    /// EOS.
    Marked { first: u64, bos: Option<u32>, eos: Option<u32> },
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
    /// Splits a file into its training part and its held-out part. The held-out part has documents
    /// with the share `fraction` of the tokens. If the file does not list documents, it is the end
    /// of the file. `name` is the digest of the file's content.
    pub(super) fn both(
        file: TokenFile,
        fraction: f64,
        tokenizer: &Tokenizer,
        name: &str,
        of: &str,
        cache: &Path,
    ) -> Result<[Self; 2], DataError> {
        let (file, name) = (Arc::new(file), format!("{name}-{:016x}", fraction.to_bits()));
        let part = |documents, size, which: &str| Self {
            fingerprint: format!("{name}-{which}"),
            size,
            of: of.into(),
            file: file.clone(),
            documents,
        };
        if file.lists_documents() {
            let [(train, train_size), (held_out, held_out_size)] = split(&file, fraction, &name, of, cache)?;
            let [train, held_out] = [train, held_out].map(|path| RawFile::open(&path).map(Documents::Listed));
            return Ok([part(train?, train_size, "train"), part(held_out?, held_out_size, "held_out")]);
        }
        let (bos, eos, len) = (tokenizer.bos(), tokenizer.eos(), file.len());
        let cut = len - (fraction * len as f64) as u64;
        let size = |tokens| PartSize { tokens, targets: (!file.has_mask()).then_some(tokens), ..PartSize::default() };
        let marked = |first| Documents::Marked { first, bos, eos };
        Ok([part(marked(0), size(cut), "train"), part(marked(cut), size(len - cut), "held_out")])
    }

    /// Length in tokens.
    pub(super) fn len(&self) -> u64 {
        self.size.tokens
    }

    pub(super) fn has_mask(&self) -> bool {
        self.file.has_mask()
    }

    /// Whether the loss counts a token after the first one in `range`.
    pub(super) fn has_target(&self, range: Range<u64>) -> Result<bool, DataError> {
        if !self.has_mask() {
            return Ok(range.end - range.start > 1);
        }
        let mask = self.read(range)?.mask.unwrap_or_default();
        Ok(mask.iter().skip(1).any(|counts| *counts))
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Window, DataError> {
        match &self.documents {
            Documents::Listed(list) => self.read_listed(list, range),
            Documents::Marked { first, bos, eos } => {
                let begin = first + range.start;
                let mut window = Window::default();
                self.append(begin..first + range.end, &mut window)?;
                // The token before the window may end a document.
                let before = if begin > 0 { self.file.read(begin - 1..begin)?.pop() } else { None };
                let tokens = &window.tokens;
                let begins = |place: &usize| match bos {
                    Some(bos) => tokens[*place] == *bos,
                    None if *place == 0 => before.is_none_or(|before| *eos == Some(before)),
                    None => *eos == Some(tokens[*place - 1]),
                };
                window.starts = (0..tokens.len()).filter(begins).collect();
                Ok(window)
            }
        }
    }

    /// Reads a range of listed documents. Documents that follow each other in the file are read
    /// together.
    fn read_listed(&self, list: &RawFile, range: Range<u64>) -> Result<Window, DataError> {
        let first = self.first_from(list, range.start + 1)?.saturating_sub(1);
        let documents = list.pairs(first, self.first_from(list, range.end)? - first)?;
        let (mut window, mut runs) = (Window::default(), Vec::<Range<u64>>::new());
        for (i, [start, begin]) in documents.iter().enumerate() {
            let end = documents.get(i + 1).map_or(range.end, |next| next[0]);
            let run = begin + range.start.saturating_sub(*start)..begin + (end - start);
            match runs.last_mut().filter(|last| last.end == run.start) {
                Some(last) => last.end = run.end,
                None => runs.push(run),
            }
            window.starts.extend(start.checked_sub(range.start).map(|place| place as usize));
        }
        runs.into_iter().try_for_each(|run| self.append(run, &mut window))?;
        Ok(window)
    }

    /// Appends a range of the file's tokens and mask.
    fn append(&self, range: Range<u64>, window: &mut Window) -> Result<(), DataError> {
        window.tokens.extend(self.file.read(range.clone())?);
        if let Some(mask) = self.file.read_mask(range)? {
            window.mask.get_or_insert_default().extend(mask);
        }
        Ok(())
    }

    /// Index of the first listed document that begins at `place` or later.
    fn first_from(&self, list: &RawFile, place: u64) -> Result<u64, DataError> {
        let (mut low, mut high) = (0, self.size.documents.unwrap_or_default());
        while low < high {
            let middle = low + (high - low) / 2;
            match list.pairs(middle, 1)?[0] {
                [start, _] if start < place => low = middle + 1,
                _ => high = middle,
            }
        }
        Ok(low)
    }

    /// Index of the document that contains `place`, and the offset in it. Without listed documents
    /// there is no index, and the offset is in the file.
    pub(super) fn document_at(&self, place: u64) -> Result<(Option<u64>, u64), DataError> {
        match &self.documents {
            Documents::Listed(list) => {
                let document = self.first_from(list, place + 1)?.saturating_sub(1);
                Ok((Some(document), place - list.pairs(document, 1)?[0][0]))
            }
            Documents::Marked { first, .. } => Ok((None, first + place)),
        }
    }

    /// Visits all documents in order, each as a range of tokens.
    pub(super) fn each_document(
        &self,
        mut visit: impl FnMut(Range<u64>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut begin = 0;
        let mut boundary = |start: u64| -> Result<(), DataError> {
            // The first document may have begun before this part.
            if start > begin {
                visit(begin..start)?;
                begin = start;
            }
            Ok(())
        };
        let count = self.size.documents.unwrap_or(self.len());
        for first in (0..count).step_by(CHUNK as usize) {
            let end = count.min(first + CHUNK);
            let starts: Vec<u64> = match &self.documents {
                Documents::Listed(list) => {
                    list.pairs(first, end - first)?.into_iter().map(|[start, _]| start).collect()
                }
                Documents::Marked { .. } => {
                    self.read(first..end)?.starts.into_iter().map(|start| first + start as u64).collect()
                }
            };
            starts.into_iter().try_for_each(&mut boundary)?;
        }
        boundary(self.len())
    }
}
