//! [`Opener`]: opens a source as parts of token files. Documents are tokenized first, unless the
//! cache has their tokens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cache::entry;
use super::encode::Encoder;
use super::file_state::FileState;
use super::left_out::LeftOut;
use super::packing::Packing;
use super::part::Part;
use super::position::SourceState;
use super::scan::Scanner;
use super::source::Selection;
use super::token_file::TokenFile;
use super::tokenize::{TOKENS, tokenize};
use super::{DataError, DataSource, Format};
use crate::digest::Fingerprint;
use crate::progress::Progress;
use crate::{ChatTemplate, Tokenizer};

/// Version of the tokenizing code and of the token file format, which decide the content of the
/// cache.
const CACHE_VERSION: u64 = 5;
/// Version of the source fingerprints.
const FINGERPRINT_VERSION: u64 = 2;

/// Tokenized source.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) paths: Vec<PathBuf>,
    pub(super) weight: Option<f64>,
    /// State with the default packing.
    pub(super) state: SourceState,
    pub(super) train: Vec<Arc<Part>>,
    pub(super) held_out: Vec<Arc<Part>>,
}

/// Inputs for opening sources, and results so far.
pub(super) struct Opener<'a> {
    pub(super) held_out_fraction: f64,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    pub(super) cache: &'a Path,
    pub(super) progress: &'a mut dyn FnMut(Progress),
    /// Number of files of each format.
    pub(super) formats: BTreeMap<Format, usize>,
    pub(super) left: LeftOut,
    /// Whether nothing had to be tokenized.
    pub(super) was_cached: bool,
}

impl Opener<'_> {
    pub(super) fn open(&mut self, source: &DataSource) -> Result<Source, DataError> {
        let memory = self.cache.join(format!("{}.files.json", source_name(source)));
        let mut scanner = Scanner::load(&memory);
        let selection = source.select(&mut scanner);
        scanner.save(&memory);
        let Selection { files, left } = selection?;
        self.left.extend(&left);
        files.iter().for_each(|file| *self.formats.entry(file.format).or_default() += 1);

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
            files: SourceState::list_files(&files),
        };
        // Path, bytes taken, cache name, and the data's path for display.
        let mut opened = vec![];
        if !documents.is_empty() {
            // The held-out fraction does not change the tokens.
            let mut name = fingerprint(CACHE_VERSION, 0.0, &documents);
            // Tokens made for another model may exceed this model's vocabulary.
            if let Some(limit) = self.tokenizer.limit() {
                name = format!("{name}-{limit}");
            }
            let encoder = Encoder { tokenizer: self.tokenizer, template: self.template, field: &source.field };
            let tokenize = |folder: &Path| tokenize(&documents, &encoder, folder, self.progress).map(drop);
            let of = names(&source.paths);
            let cached = entry(self.cache, &name, &of, tokenize)?;
            self.was_cached &= cached.was_cached;
            opened.push((cached.folder.join(TOKENS), u64::MAX, name, of));
        }
        for file in token_files {
            // The modification time is part of the name. Document lists are made from the whole
            // file, while its fingerprint may cover only samples.
            let name = format!("{}-{}", fingerprint(CACHE_VERSION, 0.0, &[file]), file.modified);
            opened.push((file.path.clone(), file.taken, name, names(std::slice::from_ref(&file.path))));
        }
        let (mut train, mut held_out) = (vec![], vec![]);
        for (path, taken, name, of) in opened {
            let file = TokenFile::open(&path, taken, self.tokenizer)?;
            let parts = Part::both(file, self.held_out_fraction, self.tokenizer, &name, &of, self.cache)?;
            let [first, second] = parts.map(Arc::new);
            train.push(first);
            held_out.push(second);
        }
        if train.iter().any(|part| part.has_mask()) {
            state.packing = Packing::Whole;
        }
        Ok(Source { paths: source.paths.clone(), weight: source.weight, state, train, held_out })
    }
}

fn template_fingerprint(template: &ChatTemplate) -> String {
    let variables = serde_json::Value::Object(template.variables().clone()).to_string();
    Fingerprint::default().field(template.source()).field(variables).hex()
}

/// First of these paths, and the number of the others.
fn names(paths: &[PathBuf]) -> String {
    let first = paths.first().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    let more = if paths.len() > 1 { format!(" and {} more", paths.len() - 1) } else { String::new() };
    format!("{}{more}", first.unwrap_or_default().display())
}

/// Name of the scanner's memory of a source.
fn source_name(source: &DataSource) -> String {
    let paths = source.paths.iter().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    paths.fold(Fingerprint::default(), |name, path| name.field(path.as_os_str().as_encoded_bytes())).hex()
}
