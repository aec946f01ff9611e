//! [`Dataset`]: sources, tokenized, and the sequences that are made of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cache::entry;
use super::encode::Encoder;
use super::error::cannot_write;
use super::file_state::FileState;
use super::left_out::LeftOut;
use super::packing::{Packing, Sequence, Sequences};
use super::part::Part;
use super::position::SourceState;
use super::scan::Scanner;
use super::sequences::{Stream, TrainSequences};
use super::token_file::TokenFile;
use super::tokenize::{TOKENS, tokenize};
use super::{DataError, DataSource, Format};
use crate::digest::Fingerprint;
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// The version of what decides what the cache holds and is in no file: the way from text to tokens in this code, and the token file.
const CACHE_VERSION: u64 = 3;
/// That of the fingerprints of sources. It stays, so that earlier checkpoints go on where the tokens are the same.
const FINGERPRINT_VERSION: u64 = 1;
/// That of a fingerprint where they are not: where earlier versions may have made other tokens of the documents.
const NEW_TOKENS: u64 = 2;

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

    fn sequences(&self, part: &Arc<Part>, packing: Packing, seq_len: usize) -> Result<Sequences, DataError> {
        match packing {
            Packing::Wrapped => Ok(Sequences::windows(part.clone(), seq_len, self.padding)),
            Packing::Whole => Sequences::whole(part.clone(), seq_len, self.padding, &self.cache),
        }
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
            let packing = shape.packing.unwrap_or(source.state.packing);
            for part in judging {
                parts.push((0, self.sequences(part, packing, seq_len)?));
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
    fn open(&mut self, source: &DataSource, files: &[FileState]) -> Result<(Source, bool), DataError> {
        let (token_files, documents): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.format == Format::Bin);
        let is_object = |file: &&FileState| matches!(file.format, Format::Jsonl | Format::Json | Format::Parquet);
        let has_objects = documents.iter().any(is_object);
        let field = if has_objects { source.field.clone() } else { String::new() };
        let chat_template = self.template.filter(|_| has_objects).map(template_fingerprint);
        let tokenizer = self.tokenizer.fingerprint();
        let fingerprint = |version: u64, held_out_fraction: f64, files: &[&FileState]| {
            let settings = Fingerprint::default()
                .number(version)
                .field(&tokenizer)
                .field(chat_template.as_deref().unwrap_or_default())
                .field(&field)
                .number(held_out_fraction.to_bits());
            let file = |fingerprint: Fingerprint, file: &&FileState| {
                fingerprint.field(format!("{:?}", file.format)).number(file.taken).field(&file.sha256)
            };
            files.iter().fold(settings, file).hex()
        };
        let mut state = SourceState {
            fingerprint: fingerprint(FINGERPRINT_VERSION, self.held_out_fraction, &files.iter().collect::<Vec<_>>()),
            tokenizer: tokenizer.clone(),
            chat_template: chat_template.clone(),
            field: field.clone(),
            held_out_fraction: self.held_out_fraction,
            packing: Packing::Wrapped,
            num_files: files.len(),
            files: SourceState::list_files(files),
        };
        // Each with how much of it is taken, and the digest of that.
        let (mut opened, mut was_cached) = (vec![], true);
        if !documents.is_empty() {
            // What is held out is no matter of tokens.
            let name = fingerprint(CACHE_VERSION, 0.0, &documents);
            let encoder = Encoder { tokenizer: self.tokenizer, template: self.template, field: &source.field };
            let tokenize = |folder: &Path| Ok(tokenize(&documents, &encoder, folder, self.progress)?.1);
            let cached = entry(self.cache, &name, tokenize)?;
            was_cached = cached.was_cached;
            if cached.manifest {
                state.fingerprint = Fingerprint::default().field(&state.fingerprint).number(NEW_TOKENS).hex();
            }
            opened.push((cached.folder.join(TOKENS), u64::MAX, name));
        }
        for file in token_files {
            // The time of change too: lists of documents are made of all of a file, of which the fingerprint may know samples.
            let name = format!("{}-{}", fingerprint(CACHE_VERSION, 0.0, &[file]), file.modified);
            opened.push((file.path.clone(), file.taken, name));
        }
        let (mut train, mut held_out) = (vec![], vec![]);
        for (path, taken, name) in opened {
            let file = TokenFile::open(&path, taken, self.tokenizer)?;
            let parts = Part::both(file, self.held_out_fraction, self.tokenizer, &name, self.cache)?;
            let [first, second] = parts.map(Arc::new);
            train.push(first);
            held_out.push(second);
        }
        if train.iter().any(|part| part.has_mask()) {
            state.packing = Packing::Whole;
        }
        Ok((Source { paths: source.paths.clone(), weight: source.weight, state, train, held_out }, was_cached))
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
