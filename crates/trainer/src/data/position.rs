//! [`Position`]: position of training in its data, and the state of that data.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::Packing;
use super::scan::FileState;

/// Sources with more files do not list them in a position.
const MAX_FILES: usize = 1000;

/// Position of training in its data, as saved in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Sequences taken in total.
    pub sequences: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Targets per sequence.
    pub seq_len: usize,
    /// One for each source with a weight, or one for all sources.
    pub streams: Vec<StreamPosition>,
}

/// Position in sources that are visited together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamPosition {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Sequences taken in this epoch.
    pub index: u64,
    /// Place where the next sequence begins.
    pub next: DataPlace,
    /// Weight of the source.
    pub weight: Option<f64>,
    /// State of the sources.
    pub sources: Vec<SourceState>,
}

/// Place in the data, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPlace {
    /// Index of the source, from 0.
    pub source: usize,
    /// Index of the training document, from 0.
    pub document: u64,
    /// Tokens from the beginning of the document.
    pub offset: u64,
}

/// State of a source when its sequences were made: everything that decides them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceState {
    /// SHA-256 over everything that decides its tokens.
    pub fingerprint: String,
    /// Fingerprint of the tokenizer.
    pub tokenizer: String,
    /// Fingerprint of the chat template.
    pub chat_template: Option<String>,
    /// [`DataSource::field`](super::DataSource::field).
    pub field: String,
    /// Share that is held out from training.
    pub validation_split: f64,
    /// Packing of its documents.
    pub packing: Packing,
    /// Number of its files.
    pub num_files: usize,
    /// Its files, unless there are more than 1000.
    pub files: Vec<FileState>,
}

impl SourceState {
    pub(super) fn list_files(files: &[FileState]) -> Vec<FileState> {
        if files.len() > MAX_FILES { vec![] } else { files.to_vec() }
    }

    /// Checks that `now` gives the same sequences. The error names a difference.
    pub(super) fn check(&self, now: &Self) -> Result<()> {
        if self.num_files == self.files.len() && now.num_files == now.files.len() {
            self.check_files(now)?;
        }
        if self.tokenizer != now.tokenizer {
            return changed("it is tokenized with another tokenizer, or one whose files have changed");
        }
        if self.chat_template != now.chat_template {
            return changed("the chat template is another one");
        }
        let packing = |state: &Self| format!("{:?}", state.packing).to_lowercase();
        for (name, then, now) in [
            ("field", self.field.clone(), now.field.clone()),
            ("validation_split", self.validation_split.to_string(), now.validation_split.to_string()),
            ("packing", packing(self), packing(now)),
            ("the number of files", self.num_files.to_string(), now.num_files.to_string()),
        ] {
            if then != now {
                return changed(&format!("{name} was {then}, now it is {now}"));
            }
        }
        if self.fingerprint != now.fingerprint {
            return changed("one or more of the files have other content");
        }
        Ok(())
    }

    fn check_files(&self, now: &Self) -> Result<()> {
        let file_changed =
            |path: &PathBuf, difference: &str| bail!("{} changed since the checkpoint: {difference}", path.display());
        // Moved files with the same content in the same order are the same data.
        for (then, now) in self.files.iter().zip(&now.files).filter(|(then, now)| then.path == now.path) {
            if let Some(difference) = then.difference(now) {
                return file_changed(&then.path, &difference);
            }
        }
        let is_same = |(then, now): (&FileState, &FileState)| then.difference(now).is_none();
        if self.files.len() == now.files.len() && self.files.iter().zip(&now.files).all(is_same) {
            return Ok(());
        }
        let lacks = |files: &[FileState], file: &&FileState| files.iter().all(|other| other.path != file.path);
        if let Some(file) = self.files.iter().find(|file| lacks(&now.files, file)) {
            return file_changed(&file.path, "it is no longer there, or it is left out now");
        }
        match now.files.iter().find(|file| lacks(&self.files, file)) {
            Some(file) => file_changed(&file.path, "it was not there then"),
            None => changed("the order of the files is another one"),
        }
    }
}

/// Error of data that differs from the data of a checkpoint.
pub(super) fn changed<T>(difference: &str) -> Result<T> {
    bail!("the data changed since the checkpoint: {difference}")
}
