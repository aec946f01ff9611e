//! Training data, from files to sequences: formats, tokenizers, chat templates, the cache, packing,
//! order and positions.

mod cache;
mod chat;
mod digests;
mod formats;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod selection;
mod sequences;
mod split;
#[path = "../harness/table.rs"]
mod table;
mod token_files;
mod tokenizers;

use anyhow::Result;
use flate2::write::GzEncoder;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use std::{env, fs};
use table::table;
use tempfile::TempDir;
use trainer::batches::{AttnMaskType, Batch, TrainBatches, held_out_batches};
use trainer::data::{EpochSize, KeptTokens, TokenizedSource, tokenize_source};
use trainer::rng::Rng;
use trainer::{
    ChatTemplate, DataSource, Dataset, Format, Message, Packing, Position, Sequence, SequenceShape, SpecialTokens,
    Tokenizer, TrainSequences, Validation,
};

/// Folder with files, and a cache next to it.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new<C: AsRef<[u8]>>(files: impl IntoIterator<Item = (impl AsRef<Path>, C)>) -> Self {
        let new = Self { dir: TempDir::new().unwrap() };
        fs::create_dir(new.root()).unwrap();
        files.into_iter().for_each(|(name, content)| new.write(name, content));
        new
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root().join(name)
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn write(&self, name: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn source(&self, name: impl AsRef<Path>) -> DataSource {
        DataSource::new([self.path(name)])
    }

    /// All files as one source.
    fn sources(&self) -> Vec<DataSource> {
        vec![DataSource::new([self.root()])]
    }

    fn open(&self, sources: &[DataSource], validation_split: f64) -> Result<Dataset> {
        self.open_with(sources, validation_split, &Tokenizer::bytes(), None)
    }

    fn open_with(
        &self,
        sources: &[DataSource],
        validation_split: f64,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<Dataset> {
        Dataset::open(sources, Validation::Fraction(validation_split), tokenizer, template, &self.cache(), &mut |_| {})
    }

    /// Tokens of a source as one stream.
    fn tokens(&self, source: DataSource) -> Vec<u32> {
        stream(&self.open(&[source], 0.0).unwrap()).0
    }

    /// All files as bytes, without a validation part.
    fn all(&self) -> Dataset {
        self.open(&self.sources(), 0.0).unwrap()
    }

    /// Message, with its causes, of the error of opening all files and reading an epoch.
    fn error(&self) -> String {
        self.error_of(&self.sources())
    }

    fn error_of_file(&self, name: &str) -> String {
        self.error_of(&[self.source(name)])
    }

    fn error_of(&self, sources: &[DataSource]) -> String {
        message(&self.open(sources, 0.0).and_then(|dataset| epoch(&dataset, wrapped(2))).unwrap_err())
    }
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

fn tokenizer_file() -> PathBuf {
    vectors().join("tokenizer.json")
}

fn tokenizer_json() -> Value {
    serde_json::from_str(&fs::read_to_string(tokenizer_file()).unwrap()).unwrap()
}

/// Folder with these files: texts, or JSON.
fn folder(files: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, content) in files.as_object().unwrap() {
        let text = content.as_str().map_or_else(|| content.to_string(), String::from);
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn message(error: &anyhow::Error) -> String {
    format!("{error:#}")
}

fn wrapped(seq_len: usize) -> SequenceShape {
    SequenceShape { batch_size: 1, seq_len, packing: Some(Packing::Wrapped) }
}

fn whole(seq_len: usize) -> SequenceShape {
    SequenceShape { packing: Some(Packing::Whole), ..wrapped(seq_len) }
}

fn by_default(seq_len: usize) -> SequenceShape {
    SequenceShape { packing: None, ..wrapped(seq_len) }
}

/// All sequences of the first epoch.
fn epoch(dataset: &Dataset, shape: SequenceShape) -> Result<Vec<Sequence>> {
    let sequences = dataset.train(shape, 1)?;
    let count = sequences.sequences_per_epoch().iter().sum::<u64>();
    sequences.take(count as usize).collect()
}

fn take(sequences: &mut TrainSequences, count: usize) -> Vec<Sequence> {
    sequences.take(count).collect::<Result<_, _>>().unwrap()
}

/// The training stream as one window, and the positions where documents begin.
fn stream(dataset: &Dataset) -> (Vec<u32>, Vec<usize>) {
    let tokens = dataset.size().train_tokens as usize;
    let sequences = epoch(dataset, wrapped(tokens - 1)).unwrap();
    assert_eq!((sequences.len(), sequences[0].tokens.len()), (1, tokens));
    (sequences[0].tokens.clone(), sequences[0].document_starts.clone())
}

fn held_out_stream(dataset: &Dataset) -> Vec<u32> {
    match dataset.size().held_out_tokens as usize {
        0 => vec![],
        tokens => dataset.held_out(wrapped(tokens - 1), 1).unwrap()[0].tokens.clone(),
    }
}

/// Stream of these texts as bytes.
fn documents<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> Vec<u32> {
    texts.into_iter().flat_map(|text| Tokenizer::bytes().document(text.as_ref()).unwrap()).collect()
}

/// Lines of JSON with these texts.
fn lines<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> String {
    texts.into_iter().map(|text| format!("{}\n", json!({ "text": text.as_ref() }))).collect()
}

/// Changes a bit of a file.
fn flip(path: impl AsRef<Path>, place: usize) {
    let mut bytes = fs::read(&path).unwrap();
    bytes[place] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Random letters.
fn noise(rng: &mut Rng, len: usize) -> String {
    (0..len).map(|_| char::from(b'a' + rng.below(26) as u8)).collect()
}

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

/// Chat template that begins with `before`.
fn template(before: &str) -> ChatTemplate {
    ChatTemplate::new(&format!("{before}{TEMPLATE}"), [("", ""); 0]).unwrap()
}

/// Tokenizer of the test vectors.
fn folder_with_tokenizer() -> Tokenizer {
    Tokenizer::from_file(tokenizer_file()).unwrap()
}
