//! [`Checkpoints`]: writes a run's checkpoints, beside training or not, one at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::state::Snapshot;
use super::{ASSETS, CONFIG, CheckpointError, CheckpointFolder, Worth, saved_steps};
use crate::config::CheckpointSection;

/// A checkpoint that has been written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Optimizer steps made.
    pub step: usize,
    /// What it is worth.
    pub worth: Worth,
    /// From the first tensor to the last rename.
    pub took: Duration,
}

/// The checkpoints of a run that is under way.
#[derive(Debug)]
pub struct Checkpoints {
    path: PathBuf,
    /// None where another process writes.
    folder: Option<Arc<CheckpointFolder>>,
    /// The run's configuration, as TOML.
    config: String,
    keep: usize,
    every: usize,
    in_background: bool,
    under_way: Option<JoinHandle<Result<Written, CheckpointError>>>,
}

impl Checkpoints {
    /// The checkpoints of a run of `config`, if `section` wants any. A new run needs a folder without one; `assets` writes
    /// there what `resume` and `export` will need of other folders.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`], [`CheckpointError::Occupied`], [`CheckpointError::Io`], or the error of `assets`.
    pub fn new<E: From<CheckpointError>>(
        section: &CheckpointSection,
        config: String,
        is_new: bool,
        assets: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        let Some(path) = &section.folder else { return Ok(None) };
        let folder = CheckpointFolder::open(path)?;
        if let (true, Some(&step)) = (is_new, saved_steps(path)?.last()) {
            return Err(CheckpointError::Occupied { folder: path.clone(), step }.into());
        }
        if is_new {
            // Those of a run that ended before its first checkpoint may be of another model: a folder without a configuration holds no
            // run.
            folder.remove_file(CONFIG)?;
            folder.write_folder(ASSETS, assets)?;
        }
        Ok(Some(Self::of(section, path, Some(Arc::new(folder)), config)))
    }

    /// Those that another process writes: this one knows when they are due.
    pub fn of_another(section: &CheckpointSection) -> Option<Self> {
        section.folder.as_ref().map(|path| Self::of(section, path, None, String::new()))
    }

    fn of(section: &CheckpointSection, path: &Path, folder: Option<Arc<CheckpointFolder>>, config: String) -> Self {
        let CheckpointSection { every, keep, background, .. } = *section;
        Self { path: path.to_path_buf(), folder, config, keep, every, in_background: background, under_way: None }
    }

    /// Whether there is to be one after `step` of `steps`.
    pub(crate) fn is_due(&self, step: usize, steps: usize) -> bool {
        step == steps || (self.every > 0 && step.is_multiple_of(self.every))
    }

    /// Notes the configuration in the folder: from now on `resume` goes on with this run.
    pub(crate) fn begin(&self) -> Result<(), CheckpointError> {
        self.folder.as_ref().map_or(Ok(()), |folder| folder.write(CONFIG, self.config.as_bytes()))
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `snapshot`, after the one before. What has been written by now is returned.
    pub(crate) fn save(&mut self, snapshot: Snapshot, worth: Worth) -> Result<Vec<Written>, CheckpointError> {
        let before = self.finish()?;
        let Some(folder) = self.folder.clone() else { return Ok(vec![]) };
        let (config, keep) = (self.config.clone(), self.keep);
        let write = move || {
            let (start, step) = (Instant::now(), snapshot.step());
            folder.save::<CheckpointError>(step as u64, worth, keep, |folder| snapshot.write(folder, &config))?;
            Ok(Written { step, worth, took: start.elapsed() })
        };
        if self.in_background {
            self.under_way = Some(std::thread::spawn(write));
            return Ok(before.into_iter().collect());
        }
        Ok(before.into_iter().chain([write()?]).collect())
    }

    /// What has been written since, without waiting.
    pub(crate) fn poll(&mut self) -> Result<Option<Written>, CheckpointError> {
        match &self.under_way {
            Some(thread) if thread.is_finished() => self.finish(),
            _ => Ok(None),
        }
    }

    /// Waits for the checkpoint that is under way.
    pub(crate) fn finish(&mut self) -> Result<Option<Written>, CheckpointError> {
        match self.under_way.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(written)) => written.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Checkpoints {
    /// A run that ends with an error leaves its last checkpoint whole.
    fn drop(&mut self) {
        if let Some(thread) = self.under_way.take() {
            let _ = thread.join();
        }
    }
}
