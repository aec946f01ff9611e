//! [`Position`]: position of training in its data, and the state of that data.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::file_state::FileState;
use super::{DataError, Packing};

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
    pub next: Place,
    /// Weight of the source.
    pub weight: Option<f64>,
    /// State of the sources.
    pub sources: Vec<SourceState>,
}

/// Place in the data, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Index of the source, from 0.
    pub source: usize,
    /// Index of the training document, from 0. `None` in a token file that does not list its
    /// documents.
    pub document: Option<u64>,
    /// Tokens from the beginning of the document, or of the token file.
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
    pub held_out_fraction: f64,
    /// Packing of its documents.
    pub packing: Packing,
    /// Number of its files.
    pub num_files: usize,
    /// Its files, unless there are more than 1000.
    pub files: Vec<FileState>,
}

/// Whether two numbers are equal except for the last digit, which a JSON parser may get wrong.
pub(super) fn is_same_number(then: f64, now: f64) -> bool {
    (then - now).abs() <= 1e-12 * now.abs()
}

impl SourceState {
    pub(super) fn list_files(files: &[FileState]) -> Vec<FileState> {
        if files.len() > MAX_FILES { vec![] } else { files.to_vec() }
    }

    /// Checks that `now` gives the same sequences.
    ///
    /// # Errors
    /// [`DataError::ChangedFile`] and [`DataError::ChangedData`] if it does not.
    pub(super) fn check(&self, now: &Self) -> Result<(), DataError> {
        if self.num_files == self.files.len() && now.num_files == now.files.len() {
            self.check_files(now)?;
        }
        let changed = |what: String| Err(DataError::ChangedData { difference: what });
        if self.tokenizer != now.tokenizer {
            changed("it is tokenized with another tokenizer, or one whose files have changed".into())
        } else if self.chat_template != now.chat_template {
            changed("the chat template is another one".into())
        } else if self.field != now.field {
            changed(format!("text was read from the field `{}`, now from `{}`", self.field, now.field))
        } else if !is_same_number(self.held_out_fraction, now.held_out_fraction) {
            changed(format!("held_out_fraction was {}, now it is {}", self.held_out_fraction, now.held_out_fraction))
        } else if self.packing != now.packing {
            changed(format!("packing was {:?}, now it is {:?}", self.packing, now.packing).to_lowercase())
        } else if self.num_files != now.num_files {
            changed(format!("there were {} files, now there are {}", self.num_files, now.num_files))
        } else if self.fingerprint != now.fingerprint {
            changed("one or more of the files have other content".into())
        } else {
            Ok(())
        }
    }

    fn check_files(&self, now: &Self) -> Result<(), DataError> {
        let changed = |path: &PathBuf, difference| Err(DataError::ChangedFile { path: path.clone(), difference });
        // Moved files with the same content in the same order are the same data.
        for (then, now) in self.files.iter().zip(&now.files) {
            if let Some(difference) = then.difference(now).filter(|_| then.path == now.path) {
                return changed(&then.path, difference);
            }
        }
        let is_in = |file: &FileState, files: &[FileState]| files.iter().any(|other| other.path == file.path);
        let same = |(then, now): (&FileState, &FileState)| then.difference(now).is_none();
        if self.files.len() == now.files.len() && self.files.iter().zip(&now.files).all(same) {
            return Ok(());
        }
        if let Some(file) = self.files.iter().find(|file| !is_in(file, &now.files)) {
            return changed(&file.path, "it is no longer there, or it is left out now".into());
        }
        match now.files.iter().find(|file| !is_in(file, &self.files)) {
            Some(file) => changed(&file.path, "it was not there then".into()),
            None => Err(DataError::ChangedData { difference: "the order of the files is another one".into() }),
        }
    }
}
