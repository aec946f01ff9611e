//! [`Dataset`]: tokenized sources, and sequences made from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::cannot_write;
use super::left_out::LeftOut;
use super::opener::{Opener, Source};
use super::packing::{Packing, Sequence, Sequences};
use super::part::Part;
use super::position::SourceState;
use super::sequences::{Stream, TrainSequences};
use super::{DataError, DataSource, Format};
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// Size of a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetSize {
    /// Files read.
    pub files: usize,
    /// Files skipped, see [`Dataset::left_out`].
    pub skipped: usize,
    /// Training tokens.
    pub train_tokens: u64,
    /// Held-out tokens.
    pub held_out_tokens: u64,
    /// Documents held out completely; `None` if token files do not list documents.
    pub held_out_documents: Option<u64>,
}

/// Shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    /// Sequences per batch.
    pub batch_size: usize,
    /// Targets per sequence.
    pub seq_len: usize,
    /// Packing of documents. If absent, sources with messages or a mask keep documents whole, and
    /// others are wrapped.
    pub packing: Option<Packing>,
}

/// Data for validation.
#[derive(Clone, Copy, Debug)]
pub enum Validation<'a> {
    /// Share of each source to hold out of training. Documents with this share of the tokens are
    /// held out, or the end of a token file that does not list its documents.
    Fraction(f64),
    /// All of other sources.
    Sources(&'a [DataSource]),
}

/// Tokenized sources.
#[derive(Debug)]
pub struct Dataset {
    sources: Vec<Source>,
    /// Validation sources. Their training parts are used for validation.
    validation: Vec<Source>,
    cache: PathBuf,
    formats: BTreeMap<Format, usize>,
    left: LeftOut,
    size: DatasetSize,
    was_cached: bool,
    has_template: bool,
    padding: u32,
}

impl Dataset {
    /// Finds the tokens of `sources` and of the validation sources in the folder `cache`, or
    /// tokenizes the sources into it. Token files are read in place.
    ///
    /// `template` renders `messages`. `progress` is called while tokenizing.
    ///
    /// # Errors
    /// Any [`DataError`] except the errors of [`train`](Self::train) and [`TrainSequences::seek`].
    pub fn open(
        sources: &[DataSource],
        validation: Validation<'_>,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        cache: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, DataError> {
        let (fraction, others) = match validation {
            Validation::Fraction(fraction) => (fraction, &[][..]),
            Validation::Sources(others) => (0.0, others),
        };
        check_weights(sources)?;
        if sources.iter().chain(others).all(|source| source.paths.is_empty()) {
            return Err(DataError::NoSource);
        }
        if !(0.0..1.0).contains(&fraction) {
            return Err(DataError::HeldOutFraction { fraction });
        }
        fs::create_dir_all(cache).map_err(cannot_write(cache))?;
        let mut opener = Opener {
            held_out_fraction: fraction,
            tokenizer,
            template,
            cache,
            progress,
            formats: BTreeMap::new(),
            left: LeftOut::default(),
            was_cached: true,
        };
        let sources = sources.iter().map(|source| opener.open(source)).collect::<Result<_, _>>()?;
        let validation = others.iter().map(|source| opener.open(source)).collect::<Result<_, _>>()?;
        let Opener { formats, left, was_cached, .. } = opener;
        let mut dataset = Self {
            sources,
            validation,
            cache: cache.into(),
            size: DatasetSize { files: formats.values().sum(), skipped: left.count(), ..DatasetSize::default() },
            formats,
            left,
            was_cached,
            has_template: template.is_some(),
            padding: tokenizer.eos().or(tokenizer.bos()).unwrap_or_default(),
        };
        let tokens = |parts: &[Arc<Part>]| parts.iter().map(|part| part.len()).sum::<u64>();
        dataset.size.train_tokens = dataset.sources.iter().map(|source| tokens(&source.train)).sum();
        dataset.size.held_out_tokens = dataset.judging().map(|(_, parts)| tokens(parts)).sum();
        let held_out = dataset.judging().flat_map(|(_, parts)| parts);
        let whole = held_out.map(|part| Some(part.size.documents? - u64::from(part.size.begins_within)));
        dataset.size.held_out_documents = whole.sum();
        Ok(dataset)
    }

    /// Validation parts, each with its source.
    fn judging(&self) -> impl Iterator<Item = (&Source, &[Arc<Part>])> {
        let own = self.sources.iter().map(|source| (source, &*source.held_out));
        own.chain(self.validation.iter().map(|source| (source, &*source.train)))
    }

    fn sequences(&self, part: &Arc<Part>, packing: Packing, seq_len: usize) -> Result<Sequences, DataError> {
        Sequences::new(part.clone(), packing, seq_len, self.padding, &self.cache)
    }

    /// Number of files read, by format.
    pub fn formats(&self) -> &BTreeMap<Format, usize> {
        &self.formats
    }

    /// Skipped files, by reason.
    pub fn left_out(&self) -> &LeftOut {
        &self.left
    }

    /// Size of the data.
    pub fn size(&self) -> DatasetSize {
        self.size
    }

    /// Whether there is a chat template, and a source has conversations or tokens of conversations.
    pub fn has_conversations(&self) -> bool {
        // Token files of other programs list no documents. Their masks need not be chat masks.
        let has_chats = |part: &Arc<Part>| part.has_mask() && part.size.documents.is_some();
        self.has_template && self.sources.iter().flat_map(|source| &source.train).any(has_chats)
    }

    /// The SHA-256 of everything that decides the tokens of each source, one per line.
    pub fn fingerprints(&self) -> String {
        self.sources.iter().map(|source| format!("{}\n", source.state.fingerprint)).collect()
    }

    /// Whether nothing had to be tokenized.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// Endless training sequences, from the beginning of the order of `seed`.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] if there are not enough full sequences for a batch.
    /// [`DataError::NoTargets`] if no sequence has a target, [`DataError::EmptySource`] if a
    /// weighted source has no sequence, [`DataError::Shape`] for an invalid shape.
    /// [`DataError::Io`] or [`DataError::Cache`] for a problem with the cache.
    pub fn train(&self, shape: SequenceShape, seed: u64) -> Result<TrainSequences, DataError> {
        let SequenceShape { batch_size, seq_len, .. } = shape.check()?;
        let mut streams: Vec<Stream> = vec![];
        for (number, source) in self.sources.iter().enumerate() {
            let packing = shape.packing.unwrap_or(source.state.packing);
            let parts = source.train.iter().map(|part| Ok((number, self.sequences(part, packing, seq_len)?)));
            let parts = parts.collect::<Result<Vec<_>, DataError>>()?;
            let state = SourceState { packing, ..source.state.clone() };
            match streams.last_mut().filter(|_| source.weight.is_none()) {
                Some(stream) => {
                    stream.sources.push(state);
                    stream.parts.extend(parts);
                }
                None => streams.push(Stream { weight: source.weight, sources: vec![state], parts }),
            }
        }
        let full = streams.iter().flat_map(|stream| &stream.parts).map(|(_, part)| part.size().full).sum();
        if streams.iter().any(Stream::has_no_targets) {
            return Err(DataError::NoTargets { split: "training", seq_len });
        }
        if full < batch_size as u64 {
            return Err(shape.too_few("training", self.size.train_tokens, full));
        }
        // Without weights there is one stream, which is not empty here.
        if let Some((_, source)) = streams.iter().zip(&self.sources).find(|(stream, _)| stream.count() == 0) {
            return Err(DataError::EmptySource { paths: source.paths.clone() });
        }
        Ok(TrainSequences::new(streams, seed, seq_len))
    }

    /// Up to `count` held-out sequences at even distances, always the same ones. No two have a
    /// target in common.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] if there is no sequence, [`DataError::NoTargets`] if none has a
    /// target. Errors of the cache as in [`train`](Self::train), and any error of reading
    /// sequences.
    pub fn held_out(&self, shape: SequenceShape, count: usize) -> Result<Vec<Sequence>, DataError> {
        let SequenceShape { seq_len, .. } = shape.check()?;
        let mut parts = vec![];
        for (source, judging) in self.judging() {
            let packing = shape.packing.unwrap_or(source.state.packing);
            for part in judging {
                parts.push((0, self.sequences(part, packing, seq_len)?));
            }
        }
        let stream = Stream { weight: None, sources: vec![], parts };
        let available = stream.count();
        if stream.has_no_targets() {
            return Err(DataError::NoTargets { split: "held-out", seq_len });
        }
        if available == 0 {
            let one = SequenceShape { batch_size: 1, ..shape };
            return Err(one.too_few("held-out", self.size.held_out_tokens, 0));
        }
        let wanted = available.min(count as u64);
        let place = |i: u64| (u128::from(i) * u128::from(available) / u128::from(wanted)) as u64;
        (0..wanted).map(|i| stream.sequence(place(i))).collect()
    }
}

impl SequenceShape {
    fn check(self) -> Result<Self, DataError> {
        let fail = |name, value| Err(DataError::Shape { name, value, range: "between 1 and 2^31 - 1" });
        let range = 1..=i32::MAX as usize;
        match self {
            Self { seq_len, .. } if !range.contains(&seq_len) => fail("seq_len", seq_len),
            Self { batch_size, .. } if !range.contains(&batch_size) => fail("batch_size", batch_size),
            shape => Ok(shape),
        }
    }

    fn too_few(self, split: &'static str, tokens: u64, sequences: u64) -> DataError {
        let Self { batch_size, seq_len, .. } = self;
        DataError::TooFewTokens { split, tokens, sequences, batch_size, seq_len }
    }
}

fn check_weights(sources: &[DataSource]) -> Result<(), DataError> {
    let is_weighted = sources.iter().any(|source| source.weight.is_some());
    for source in sources {
        match source.weight {
            Some(weight) if !(weight > 0.0 && weight.is_finite()) => {
                return Err(DataError::Weight { paths: source.paths.clone(), weight });
            }
            None if is_weighted => return Err(DataError::MissingWeight { paths: source.paths.clone() }),
            _ => {}
        }
    }
    Ok(())
}
