//! [`Part`]: what is trained on of a token file, or what of it is held out, as one stream of tokens with the places where documents
//! begin and where the loss counts.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::DataError;
use super::raw_file::RawFile;
use super::split::{PartSize, split};
use super::token_file::TokenFile;
use crate::Tokenizer;

/// Documents that are listed at once, and tokens that are read at once.
const CHUNK: u64 = 1 << 16;

/// A stream of tokens.
#[derive(Debug)]
pub(super) struct Part {
    /// The digest of everything that decides what is in it.
    pub(super) fingerprint: String,
    pub(super) size: PartSize,
    /// The data it is of, for people.
    pub(super) of: String,
    file: Arc<TokenFile>,
    documents: Documents,
}

#[derive(Debug)]
enum Documents {
    /// Here is listed where each begins, in the part and in the file.
    Listed(RawFile),
    /// The part begins at this token of the file. Documents begin with BOS; if there is none, they end with EOS.
    Marked { first: u64, bos: Option<u32>, eos: Option<u32> },
}

/// A range of a stream.
#[derive(Default)]
pub(super) struct Window {
    pub(super) tokens: Vec<u32>,
    /// The places in `tokens` at which documents begin.
    pub(super) starts: Vec<usize>,
    /// Whether the loss counts where a token is the target.
    pub(super) mask: Option<Vec<bool>>,
}

impl Part {
    /// What is trained on of a file, and what is held out of it: documents with this share of the tokens; where they are not listed, the
    /// end of the file. `name` is the digest of what is in the file.
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

    /// In tokens.
    pub(super) fn len(&self) -> u64 {
        self.size.tokens
    }

    pub(super) fn has_mask(&self) -> bool {
        self.file.has_mask()
    }

    /// Whether the loss of a token after the first one in `range` counts.
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
                // The token before may be the end of a document.
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

    /// Documents that follow each other in the file are read together.
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

    /// Appends these tokens of the file.
    fn append(&self, range: Range<u64>, window: &mut Window) -> Result<(), DataError> {
        window.tokens.extend(self.file.read(range.clone())?);
        if let Some(mask) = self.file.read_mask(range)? {
            window.mask.get_or_insert_default().extend(mask);
        }
        Ok(())
    }

    /// The number of the first listed document that begins at `place` or later.
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

    /// The number of the document that `place` is in, where documents are numbered, and the offset in it; else that in the file.
    pub(super) fn document_at(&self, place: u64) -> Result<(Option<u64>, u64), DataError> {
        match &self.documents {
            Documents::Listed(list) => {
                let document = self.first_from(list, place + 1)?.saturating_sub(1);
                Ok((Some(document), place - list.pairs(document, 1)?[0][0]))
            }
            Documents::Marked { first, .. } => Ok((None, first + place)),
        }
    }

    /// Visits all documents in their order, each as the range of its tokens.
    pub(super) fn each_document(
        &self,
        mut visit: impl FnMut(Range<u64>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut begin = 0;
        let mut boundary = |start: u64| -> Result<(), DataError> {
            // The first one may have begun before this part.
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
