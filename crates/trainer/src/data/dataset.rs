//! [`Dataset`]: tokenized sources, and sequences made from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::cache::entry;
use super::encode::Encoder;
use super::packing::{Packing, Sequence, Sequences};
use super::position::SourceState;
use super::scan::FileState;
use super::sequences::{Stream, TrainSequences};
use super::source::Selection;
use super::split_stream::StreamPart;
use super::token_file::TokenFile;
use super::tokenize::{TOKENS, tokenize};
use super::{DataSource, Format, LeftOut, cannot_write, join, no_targets};
use crate::digest::Fingerprint;
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// Version of the tokenizing code, which decides the content of the cache with the format of token
/// files.
const CACHE_VERSION: u64 = 7;
/// Version of the source fingerprints.
const FINGERPRINT_VERSION: u64 = 2;

/// Size of a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetSize {
    /// Files read.
    pub files: usize,
    /// Training tokens.
    pub train_tokens: u64,
    /// Held-out tokens.
    pub held_out_tokens: u64,
    /// Documents held out completely.
    pub held_out_documents: u64,
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
    /// held out.
    Fraction(f64),
    /// All of other sources.
    Sources(&'a [DataSource]),
}

/// Tokenized sources.
#[derive(Debug)]
pub struct Dataset {
    /// Training sources, and validation sources, which have only validation parts.
    sources: Vec<TokenizedSource>,
    num_training: usize,
    formats: BTreeMap<Format, usize>,
    left: LeftOut,
    size: DatasetSize,
    was_cached: bool,
    has_template: bool,
    padding: u32,
}

/// Tokenized source.
#[derive(Debug)]
struct TokenizedSource {
    paths: Vec<PathBuf>,
    weight: Option<f64>,
    /// State with the default packing.
    state: SourceState,
    /// Training part and validation part of each token file.
    parts: Vec<[Arc<StreamPart>; 2]>,
}

const TRAIN: usize = 0;
const HELD_OUT: usize = 1;

impl Dataset {
    /// Finds the tokens of `sources` and of the validation sources in the folder `cache`, or
    /// tokenizes the sources into it. Token files are read in place.
    ///
    /// `template` renders `messages`. `progress` is called while tokenizing.
    ///
    /// # Errors
    /// A file, line, row or setting that cannot be used, or a cache that cannot be written.
    pub fn open(
        sources: &[DataSource],
        validation: Validation<'_>,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        cache: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let (fraction, others) = match validation {
            Validation::Fraction(fraction) => (fraction, &[][..]),
            Validation::Sources(others) => (0.0, others),
        };
        check_weights(sources)?;
        let has_paths = sources.iter().chain(others).any(|source| !source.paths.is_empty());
        ensure!(has_paths, "no data: give files or folders to train on");
        ensure!((0.0..1.0).contains(&fraction), "validation_split = {fraction}: must be at least 0 and below 1");
        fs::create_dir_all(cache).with_context(cannot_write(cache))?;
        let mut dataset = Self {
            sources: vec![],
            num_training: sources.len(),
            formats: BTreeMap::new(),
            left: LeftOut::default(),
            size: DatasetSize::default(),
            was_cached: true,
            has_template: template.is_some(),
            padding: tokenizer.eos().or(tokenizer.bos()).unwrap_or_default(),
        };
        for (i, source) in sources.iter().chain(others).enumerate() {
            let mut opened = dataset.open_source(source, fraction, (tokenizer, template), cache, progress)?;
            if i >= sources.len() {
                opened.parts.iter_mut().for_each(|parts| parts.reverse());
            }
            dataset.sources.push(opened);
        }
        let parts =
            |which| dataset.sources.iter().flat_map(move |source| source.parts.iter().map(move |part| &part[which]));
        let whole = |part: &Arc<StreamPart>| part.num_documents() - u64::from(part.begins_within);
        dataset.size = DatasetSize {
            files: dataset.formats.values().sum(),
            train_tokens: parts(TRAIN).map(|part| part.len).sum(),
            held_out_tokens: parts(HELD_OUT).map(|part| part.len).sum(),
            held_out_documents: parts(HELD_OUT).map(whole).sum(),
        };
        Ok(dataset)
    }

    fn open_source(
        &mut self,
        source: &DataSource,
        validation_split: f64,
        (tokenizer, template): (&Tokenizer, Option<&ChatTemplate>),
        cache: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<TokenizedSource> {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let name = source.paths.iter().map(absolute);
        let name =
            name.fold(Fingerprint::default(), |name, path| name.field(path.as_os_str().as_encoded_bytes())).hex();
        let Selection { files, left } = source.select(Some(&cache.join(format!("{name}.files.json"))))?;
        self.left.extend(left);
        files.iter().for_each(|file| *self.formats.entry(file.format).or_default() += 1);

        let (token_files, documents): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.format == Format::Bin);
        let has_objects = documents.iter().any(|file| file.format != Format::Text);
        let field = if has_objects { source.field.clone() } else { String::new() };
        let chat_template = template.filter(|_| has_objects).map(template_fingerprint);
        let fingerprint = |version: u64, validation_split: f64, files: &[&FileState]| {
            let settings = Fingerprint::default()
                .number(version)
                .field(tokenizer.fingerprint())
                .field(chat_template.as_deref().unwrap_or_default())
                .field(&field)
                .number(validation_split.to_bits());
            let file = |fingerprint: Fingerprint, file: &&FileState| {
                fingerprint.field(format!("{:?}", file.format)).number(file.taken).field(&file.sha256)
            };
            files.iter().fold(settings, file).hex()
        };
        // Tokens made for another model may exceed this model's vocabulary.
        let limit = tokenizer.limit().map(|limit| format!("-{limit}")).unwrap_or_default();
        let mut opened = vec![];
        if !documents.is_empty() {
            // The validation fraction does not change the tokens.
            let name = fingerprint(CACHE_VERSION, 0.0, &documents) + &limit;
            let more =
                if source.paths.len() > 1 { format!(" and {} more", source.paths.len() - 1) } else { String::new() };
            let of = format!("{}{more}", absolute(&source.paths[0]).display());
            let encoder = Encoder { tokenizer, template, field: &source.field };
            let (folder, was_cached) =
                entry(cache, &name, of, |folder| tokenize(&documents, &encoder, folder, progress).map(drop))?;
            self.was_cached &= was_cached;
            opened.push(TokenFile::open(&folder.join(TOKENS), u64::MAX, tokenizer)?);
        }
        for file in &token_files {
            opened.push(TokenFile::open(&file.path, file.taken, tokenizer)?);
        }
        let has_mask = opened.iter().any(TokenFile::has_mask);
        let parts = opened.into_iter().map(|file| Ok(StreamPart::both(file, validation_split)?.map(Arc::new)));
        let parts = parts.collect::<Result<_>>()?;
        let state = SourceState {
            fingerprint: fingerprint(FINGERPRINT_VERSION, validation_split, &files.iter().collect::<Vec<_>>()),
            tokenizer: tokenizer.fingerprint(),
            chat_template,
            field,
            validation_split,
            packing: if has_mask { Packing::Whole } else { Packing::Wrapped },
            num_files: files.len(),
            files: SourceState::list_files(&files),
        };
        Ok(TokenizedSource { paths: source.paths.clone(), weight: source.weight, state, parts })
    }

    /// Sequences of the training or validation parts of a source, and their packing.
    fn sequences(
        &self,
        number: usize,
        which: usize,
        shape: SequenceShape,
    ) -> Result<(Vec<(usize, Sequences)>, Packing)> {
        let TokenizedSource { parts, state, .. } = &self.sources[number];
        let packing = shape.packing.unwrap_or(state.packing);
        let sequences = |part: &Arc<StreamPart>| Sequences::new(part.clone(), packing, shape.seq_len, self.padding);
        let sequences = parts.iter().map(|part| Ok((number, sequences(&part[which])?)));
        Ok((sequences.collect::<Result<_>>()?, packing))
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
        let mut parts = self.sources[..self.num_training].iter().flat_map(|source| &source.parts);
        self.has_template && parts.any(|[part, _]| part.has_mask())
    }

    /// The SHA-256 of everything that decides the tokens of each source, one per line.
    pub fn fingerprints(&self) -> String {
        let sources = &self.sources[..self.num_training];
        sources.iter().map(|source| format!("{}\n", source.state.fingerprint)).collect()
    }

    /// Whether nothing had to be tokenized.
    pub fn was_cached(&self) -> bool {
        self.was_cached
    }

    /// Endless training sequences, from the beginning of the order of `seed`.
    ///
    /// # Errors
    /// An invalid shape, too few full sequences for a batch, no sequence with a target, or a weighted
    /// source without a sequence.
    pub fn train(&self, shape: SequenceShape, seed: u64) -> Result<TrainSequences> {
        let SequenceShape { batch_size, seq_len, .. } = shape.check()?;
        let mut streams: Vec<Stream> = vec![];
        for (number, source) in self.sources.iter().enumerate().take(self.num_training) {
            let (parts, packing) = self.sequences(number, TRAIN, shape)?;
            let state = SourceState { packing, ..source.state.clone() };
            match streams.last_mut().filter(|_| source.weight.is_none()) {
                Some(stream) => {
                    stream.sources.push(state);
                    stream.parts.extend(parts);
                }
                None => streams.push(Stream { weight: source.weight, sources: vec![state], parts }),
            }
        }
        let full = streams.iter().flat_map(|stream| &stream.parts).map(|(_, part)| part.size.full).sum();
        if streams.iter().any(Stream::has_no_targets) {
            return Err(no_targets("training", seq_len));
        }
        if full < batch_size as u64 {
            return Err(shape.too_few("training", self.size.train_tokens, full));
        }
        // Without weights there is one stream, which is not empty here.
        if let Some((_, source)) = streams.iter().zip(&self.sources).find(|(stream, _)| stream.count() == 0) {
            let paths = join(&source.paths);
            bail!("nothing to train on in {paths}, which has a weight: give more text, or leave this source out");
        }
        Ok(TrainSequences::new(streams, seed, seq_len))
    }

    /// Up to `count` validation sequences at even distances, always the same ones. No two have a
    /// target in common.
    ///
    /// # Errors
    /// An invalid shape, no sequence, or none with a target; any error of reading sequences.
    pub fn held_out(&self, shape: SequenceShape, count: usize) -> Result<Vec<Sequence>> {
        let SequenceShape { seq_len, .. } = shape.check()?;
        let parts = (0..self.sources.len()).map(|number| Ok(self.sequences(number, HELD_OUT, shape)?.0));
        let stream = Stream {
            weight: None,
            sources: vec![],
            parts: parts.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect(),
        };
        let available = stream.count();
        if stream.has_no_targets() {
            return Err(no_targets("validation", seq_len));
        }
        if available == 0 {
            let one = SequenceShape { batch_size: 1, ..shape };
            return Err(one.too_few("validation", self.size.held_out_tokens, 0));
        }
        let wanted = available.min(count as u64);
        let place = |i: u64| (u128::from(i) * u128::from(available) / u128::from(wanted)) as u64;
        (0..wanted).map(|i| stream.sequence(place(i))).collect()
    }
}

impl SequenceShape {
    fn check(self) -> Result<Self> {
        for (name, value) in [("seq_len", self.seq_len), ("batch_size", self.batch_size)] {
            let fits = (1..=i32::MAX as usize).contains(&value);
            ensure!(fits, "{name} = {value}: must be between 1 and 2^31 - 1");
        }
        Ok(self)
    }

    fn too_few(self, split: &str, tokens: u64, sequences: u64) -> anyhow::Error {
        let Self { batch_size, seq_len, .. } = self;
        anyhow!(
            "too little text: the {split} split has {tokens} tokens, which make {sequences} sequences of {seq_len} targets; \
             one batch needs {batch_size}: give more text, raise max_bytes or make batches or sequences smaller; \
             validation_split moves text between the splits, and with 0 none is held out"
        )
    }
}

fn check_weights(sources: &[DataSource]) -> Result<()> {
    let is_weighted = sources.iter().any(|source| source.weight.is_some());
    for source in sources.iter().filter(|_| is_weighted) {
        let paths = join(&source.paths);
        let Some(weight) = source.weight else {
            bail!("no weight of {paths}, where other sources have one: give all sources a weight or none")
        };
        let fits = weight > 0.0 && weight.is_finite();
        ensure!(fits, "weight = {weight} of {paths}: weights must be positive and finite");
    }
    Ok(())
}

fn template_fingerprint(template: &ChatTemplate) -> String {
    let variables = serde_json::Value::Object(template.variables().clone()).to_string();
    Fingerprint::default().field(template.source()).field(variables).hex()
}
