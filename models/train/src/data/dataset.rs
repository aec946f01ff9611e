//! [`Dataset`]: sources, tokenized, and the sequences that are made of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cache::entry;
use super::encode::Encoder;
use super::error::cannot_write;
use super::left_out::LeftOut;
use super::packing::{Packing, Sequence, Sequences};
use super::part::{Marks, Part};
use super::position::SourceState;
use super::scan::{Scanned, Scanner};
use super::sequences::{Stream, TrainSequences};
use super::split::{StreamFiles, Streams};
use super::token_file::{TokenFile, Width};
use super::tokenize::tokenize;
use super::{DataError, DataSource, Format};
use crate::digest::Fingerprint;
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// The version of what decides what the cache holds and is in no file: the way from text to tokens in this code.
const CACHE_VERSION: u64 = 2;
/// What [`CACHE_VERSION`] was when sources got their fingerprints. It stays, so that earlier checkpoints go on where the tokens are the
/// same: where they are not, [`Streams::is_new`] changes the fingerprint.
const FINGERPRINT_VERSION: u64 = 1;

/// How much data there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetSize {
    /// Files that were read.
    pub files: usize,
    /// Files that were passed over, see [`Dataset::left_out`].
    pub skipped: usize,
    /// Tokens to train on.
    pub train_tokens: u64,
    /// Tokens held out.
    pub held_out_tokens: u64,
}

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    /// Sequences in a batch.
    pub batch_size: usize,
    /// Targets per sequence.
    pub seq_len: usize,
    /// If absent, sources with messages, and token files with a mask, keep documents whole, and others are wrapped.
    pub packing: Option<Packing>,
}

/// What a model is judged by.
#[derive(Clone, Copy, Debug)]
pub enum Validation<'a> {
    /// A part of what is trained on, which is then not trained on: of each source, documents with this share of the tokens, and the end
    /// of each token file.
    Fraction(f64),
    /// All of other sources.
    Sources(&'a [DataSource]),
}

/// Tokenized sources.
#[derive(Debug)]
pub struct Dataset {
    sources: Vec<Source>,
    /// Their training streams are what a model is judged by.
    validation: Vec<Source>,
    cache: PathBuf,
    formats: BTreeMap<Format, usize>,
    left: LeftOut,
    size: DatasetSize,
    was_cached: bool,
    padding: u32,
}

#[derive(Debug)]
struct Source {
    paths: Vec<PathBuf>,
    weight: Option<f64>,
    /// With the packing by default.
    state: SourceState,
    train: Vec<Arc<Part>>,
    held_out: Vec<Arc<Part>>,
}

impl Dataset {
    /// Finds `sources` and those of `validation` in the folder `cache`, or tokenizes them into it. Token files are read where they are.
    ///
    /// `template` is for `messages`. `progress` is called while something is tokenized.
    ///
    /// # Errors
    /// Any [`DataError`] but those of [`train`](Self::train) and [`TrainSequences::seek`].
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
        let mut dataset = Self {
            sources: vec![],
            validation: vec![],
            cache: cache.into(),
            formats: BTreeMap::new(),
            left: LeftOut::default(),
            size: DatasetSize::default(),
            was_cached: true,
            padding: tokenizer.eos().or(tokenizer.bos()).unwrap_or_default(),
        };
        let mut opener = Opener { held_out_fraction: fraction, tokenizer, template, cache, progress };
        for source in sources {
            let source = dataset.read(&mut opener, source)?;
            dataset.sources.push(source);
        }
        for source in others {
            let source = dataset.read(&mut opener, source)?;
            dataset.validation.push(source);
        }
        let tokens = |parts: &[Arc<Part>]| parts.iter().map(|part| part.len()).sum::<u64>();
        dataset.size.skipped = dataset.left.count();
        dataset.size.train_tokens = dataset.sources.iter().map(|source| tokens(&source.train)).sum();
        dataset.size.held_out_tokens = dataset.judging().map(|(_, parts)| tokens(parts)).sum();
        Ok(dataset)
    }

    /// The parts that a model is judged by, each with its source.
    fn judging(&self) -> impl Iterator<Item = (&Source, &[Arc<Part>])> {
        let own = self.sources.iter().map(|source| (source, &*source.held_out));
        own.chain(self.validation.iter().map(|source| (source, &*source.train)))
    }

    fn read(&mut self, opener: &mut Opener<'_>, source: &DataSource) -> Result<Source, DataError> {
        let memory = opener.cache.join(format!("{}.files.json", source_name(source)));
        let mut scanner = Scanner::load(&memory);
        let selection = source.select(&mut scanner);
        scanner.save(&memory);
        let selection = selection?;
        self.size.files += selection.files.len();
        self.left.extend(&selection.left);
        for file in &selection.files {
            *self.formats.entry(file.format).or_default() += 1;
        }
        let (opened, was_cached) = opener.open(source, &selection.files)?;
        self.was_cached &= was_cached;
        Ok(opened)
    }

    /// How many files of each format are read.
    pub fn formats(&self) -> &BTreeMap<Format, usize> {
        &self.formats
    }

    /// What was passed over, and why.
    pub fn left_out(&self) -> &LeftOut {
        &self.left
    }

    /// How much data there is.
    pub fn size(&self) -> DatasetSize {
        self.size
    }

    /// Whether a source has conversations.
    pub fn has_conversations(&self) -> bool {
        let is_masked = |source: &Source| source.train.iter().any(|part| part.has_mask());
        self.sources.iter().any(|source| source.state.chat_template.is_some() && is_masked(source))
    }

    /// A line for each source: the SHA-256 of everything that decides about its tokens.
    pub fn fingerprints(&self) -> String {
        self.sources.iter().map(|source| format!("{}\n", source.state.fingerprint)).collect()
    }

    /// Whether nothing had to be tokenized.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// Endless sequences to train on, from the first one of the order of `seed`.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] unless there is one batch without overlap, [`DataError::EmptySource`], [`DataError::Shape`], and
    /// [`DataError::Io`] or [`DataError::Cache`] for what is wrong with the cache.
    pub fn train(&self, shape: SequenceShape, seed: u64) -> Result<TrainSequences, DataError> {
        let SequenceShape { batch_size, seq_len, .. } = shape.check()?;
        let mut streams: Vec<Stream> = vec![];
        for (number, source) in self.sources.iter().enumerate() {
            let packing = shape.packing.unwrap_or(source.state.packing);
            let mut parts = vec![];
            for part in &source.train {
                let part = part.clone();
                parts.push(match packing {
                    Packing::Wrapped => (number, Sequences::windows(part, seq_len, self.padding)),
                    Packing::Whole => (number, Sequences::whole(part, seq_len, self.padding, &self.cache)?),
                });
            }
            let state = SourceState { packing, ..source.state.clone() };
            match streams.last_mut().filter(|_| source.weight.is_none()) {
                Some(stream) => {
                    stream.sources.push(state);
                    stream.parts.extend(parts);
                }
                None => streams.push(Stream { weight: source.weight, sources: vec![state], parts }),
            }
        }
        let full = streams.iter().flat_map(|stream| &stream.parts).map(|(_, part)| part.full()).sum();
        if full < batch_size as u64 {
            return Err(shape.too_few("training", self.size.train_tokens, full));
        }
        // Without weights there is one stream, which is not empty.
        if let Some((_, source)) = streams.iter().zip(&self.sources).find(|(stream, _)| stream.count() == 0) {
            return Err(DataError::EmptySource { paths: source.paths.clone() });
        }
        Ok(TrainSequences::new(streams, seed, seq_len))
    }

    /// Up to `count` of the sequences that a model is judged by for which `keep` gives something, at even distances over them: always
    /// the same ones. No two have a target in common.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] if there is no sequence; those of the cache as in [`train`](Self::train), and any that reading
    /// sequences has.
    pub fn held_out<T>(
        &self,
        shape: SequenceShape,
        count: usize,
        mut keep: impl FnMut(Sequence) -> Option<T>,
    ) -> Result<Vec<T>, DataError> {
        let SequenceShape { seq_len, .. } = shape.check()?;
        let mut parts = vec![];
        for (source, judging) in self.judging() {
            for part in judging.iter().cloned() {
                parts.push(match shape.packing.unwrap_or(source.state.packing) {
                    Packing::Wrapped => (0, Sequences::windows(part, seq_len, self.padding)),
                    Packing::Whole => (0, Sequences::whole(part, seq_len, self.padding, &self.cache)?),
                });
            }
        }
        let stream = Stream { weight: None, sources: vec![], parts };
        let available = stream.count();
        if available == 0 {
            let one = SequenceShape { batch_size: 1, ..shape };
            return Err(one.too_few("held-out", self.size.held_out_tokens, 0));
        }
        let wanted = available.min(count as u64);
        let place = |i: u64| (u128::from(i) * u128::from(available) / u128::from(wanted.max(1))) as u64;
        // For each place the first from there on that is kept; then, where there was none before the next place, any other.
        let mut kept: BTreeMap<u64, T> = BTreeMap::new();
        for i in 0..wanted {
            for number in place(i)..place(i + 1) {
                if let Some(sequence) = keep(stream.sequence(number)?) {
                    kept.insert(number, sequence);
                    break;
                }
            }
        }
        for i in 0..wanted {
            let passed = kept.range(place(i)..place(i + 1)).next().map(|(number, _)| number + 1);
            for number in passed.into_iter().flat_map(|passed| passed..place(i + 1)) {
                if kept.len() as u64 == wanted {
                    return Ok(kept.into_values().collect());
                }
                kept.extend(keep(stream.sequence(number)?).map(|sequence| (number, sequence)));
            }
        }
        Ok(kept.into_values().collect())
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

/// What opening a source needs.
struct Opener<'a> {
    held_out_fraction: f64,
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    cache: &'a Path,
    progress: &'a mut dyn FnMut(Progress),
}

impl Opener<'_> {
    /// And whether nothing had to be tokenized.
    fn open(&mut self, source: &DataSource, files: &[Scanned]) -> Result<(Source, bool), DataError> {
        let (token_files, documents): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.format == Format::Bin);
        let is_object = |file: &&Scanned| matches!(file.format, Format::Jsonl | Format::Json | Format::Parquet);
        let has_objects = documents.iter().any(is_object);
        let field = if has_objects { source.field.clone() } else { String::new() };
        let chat_template = self.template.filter(|_| has_objects).map(template_fingerprint);
        let tokenizer = self.tokenizer.fingerprint();
        let fingerprint = |version: u64, files: &[&Scanned]| {
            let settings = Fingerprint::default()
                .number(version)
                .field(&tokenizer)
                .field(chat_template.as_deref().unwrap_or_default())
                .field(&field)
                .number(self.held_out_fraction.to_bits());
            let file = |fingerprint: Fingerprint, file: &&Scanned| {
                fingerprint.field(format!("{:?}", file.format)).number(file.taken).field(&file.sha256)
            };
            files.iter().fold(settings, file).hex()
        };
        let name = fingerprint(CACHE_VERSION, &documents);
        let mut state = SourceState {
            fingerprint: fingerprint(FINGERPRINT_VERSION, &files.iter().collect::<Vec<_>>()),
            tokenizer: tokenizer.clone(),
            chat_template: chat_template.clone(),
            field: field.clone(),
            held_out_fraction: self.held_out_fraction,
            packing: Packing::Wrapped,
            num_files: files.len(),
            files: SourceState::list_files(files),
        };
        let names: Vec<_> = token_files.iter().map(|file| fingerprint(FINGERPRINT_VERSION, &[file])).collect();
        let (mut train, mut held_out, mut was_cached) = (vec![], vec![], true);
        if !documents.is_empty() {
            let ([first, second], is_new, was) = self.open_documents(&source.field, &documents, name)?;
            was_cached = was;
            if is_new {
                state.fingerprint = Fingerprint::default().field(&state.fingerprint).number(CACHE_VERSION).hex();
            }
            train.push(first);
            held_out.push(second);
        }
        for (file, name) in token_files.into_iter().zip(names) {
            let [first, second] = self.open_token_file(file, &name)?;
            train.push(first);
            held_out.push(second);
        }
        if train.iter().any(Part::has_mask) {
            state.packing = Packing::Whole;
        }
        let [train, held_out] = [train, held_out].map(|parts| parts.into_iter().map(Arc::new).collect());
        Ok((Source { paths: source.paths.clone(), weight: source.weight, state, train, held_out }, was_cached))
    }

    /// The parts, whether an earlier version has made others of them, and whether nothing had to be tokenized.
    fn open_documents(
        &mut self,
        field: &str,
        files: &[&Scanned],
        name: String,
    ) -> Result<([Part; 2], bool, bool), DataError> {
        let vocab_size = self.tokenizer.vocab_size();
        let width = Width::for_vocabulary(vocab_size);
        let is_whole = |folder: &Path, streams: &Streams| {
            StreamFiles::train(folder).are_whole(streams.train, width, streams.has_mask)
                && StreamFiles::held_out(folder).are_whole(streams.held_out, width, streams.has_mask)
        };
        let encoder = Encoder { tokenizer: self.tokenizer, template: self.template, field };
        let cached = entry(self.cache, &name, is_whole, |folder| {
            tokenize(files, &encoder, self.held_out_fraction, folder, self.progress)
        })?;
        let Streams { train, held_out, has_mask, is_new } = cached.manifest;
        let part = |files, size, split| Part::cached(&files, size, has_mask, vocab_size, format!("{name}-{split}"));
        let parts = [
            part(StreamFiles::train(&cached.folder), train, "train")?,
            part(StreamFiles::held_out(&cached.folder), held_out, "held_out")?,
        ];
        Ok((parts, is_new, cached.was_cached))
    }

    fn open_token_file(&self, file: &Scanned, name: &str) -> Result<[Part; 2], DataError> {
        let vocab_size = self.tokenizer.vocab_size();
        let marks = Marks { bos: self.tokenizer.bos(), eos: self.tokenizer.eos() };
        let len = TokenFile::open(&file.path, file.taken, vocab_size)?.len();
        let cut = len - (self.held_out_fraction * len as f64) as u64;
        // The time of change too: an index of documents is made of all tokens, of which the fingerprint may know samples.
        let part = |range, split| {
            let name = format!("{name}-{split}-{}", file.modified);
            Part::of_token_file(&file.path, file.taken, range, marks, vocab_size, name)
        };
        Ok([part(0..cut, "train")?, part(cut..len, "held_out")?])
    }
}

fn template_fingerprint(template: &ChatTemplate) -> String {
    let variables = serde_json::Value::Object(template.variables().clone()).to_string();
    Fingerprint::default().field(template.source()).field(variables).hex()
}

/// Where the scanner's memory of a source is.
fn source_name(source: &DataSource) -> String {
    let paths = source.paths.iter().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    paths.fold(Fingerprint::default(), |name, path| name.field(path.as_os_str().as_encoded_bytes())).hex()
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
