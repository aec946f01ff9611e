//! [`Checkpoints`]: writes a run's checkpoints one at a time, optionally in the background.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use float8_shard::Communicator;

use super::folder::LOCK;
use super::state::Snapshot;
use super::together::{OfRank, Together};
use super::{ASSETS, CONFIG, CheckpointError, CheckpointFolder, Worth, Written, diverged_step, saved_steps};
use crate::config::CheckpointSection;
use crate::metrics::METRICS_FILE;

/// Checkpoints of a running training.
#[derive(Debug)]
pub struct Checkpoints {
    path: PathBuf,
    /// `None` if another process writes.
    folder: Option<Arc<CheckpointFolder>>,
    /// The run's configuration, as TOML.
    config: String,
    keep: usize,
    every: usize,
    in_background: bool,
    /// Ranks that write together, if there are several.
    comm: Option<Communicator>,
    under_way: Option<UnderWay>,
}

/// A checkpoint being written.
#[derive(Debug)]
enum UnderWay {
    Alone(JoinHandle<Result<Written, CheckpointError>>),
    Together(Together),
}

impl Checkpoints {
    /// Prepares checkpoints of a run with `config`, if `section` has a folder. A new run needs a
    /// folder without a run. `assets` writes the files that `resume` and `export` need from other
    /// folders.
    ///
    /// # Errors
    /// [`CheckpointError::Foreign`], [`CheckpointError::Locked`], [`CheckpointError::Occupied`],
    /// [`CheckpointError::Diverged`], [`CheckpointError::Io`], or the error of `assets`.
    pub fn new<E: From<CheckpointError>>(
        section: &CheckpointSection,
        config: String,
        is_new: bool,
        assets: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        let Some(path) = &section.folder else { return Ok(None) };
        let foreign = [CONFIG, ASSETS, METRICS_FILE].map(|name| path.join(name)).into_iter().find(|path| path.exists());
        if let Some(foreign) = foreign.filter(|_| is_new && !path.join(LOCK).exists()) {
            return Err(CheckpointError::Foreign { path: foreign }.into());
        }
        let folder = CheckpointFolder::open(path)?;
        if let (true, Some(&step)) = (is_new, saved_steps(path)?.last()) {
            return Err(CheckpointError::Occupied { folder: path.clone(), step }.into());
        }
        if let (true, Some(step)) = (is_new, diverged_step(path)?) {
            return Err(CheckpointError::Diverged { folder: path.clone(), step }.into());
        }
        if is_new {
            // Assets of a run that ended before its first checkpoint may belong to another model. A
            // folder without a configuration has no run.
            folder.remove_file(CONFIG)?;
            folder.write_folder(ASSETS, assets)?;
        }
        Ok(Some(Self::of(section, path, Some(Arc::new(folder)), config)))
    }

    /// Checkpoints for a rank other than the first: it writes its files to the first rank's folder.
    pub fn of_another(section: &CheckpointSection) -> Option<Self> {
        section.folder.as_ref().map(|path| Self::of(section, path, None, String::new()))
    }

    /// Writes checkpoints together with other ranks: each writes its files, then the first
    /// completes the checkpoint. All ranks must save and wait at the same steps.
    #[must_use]
    pub fn with_ranks(mut self, comm: Communicator) -> Self {
        self.comm = Some(comm).filter(|comm| comm.world_size() > 1);
        self
    }

    fn of(section: &CheckpointSection, path: &Path, folder: Option<Arc<CheckpointFolder>>, config: String) -> Self {
        let CheckpointSection { every, keep, background, .. } = *section;
        let (path, comm, under_way) = (path.to_path_buf(), None, None);
        Self { path, folder, config, keep, every, in_background: background, comm, under_way }
    }

    /// Sets the configuration to save.
    #[must_use]
    pub fn with_config(mut self, config: String) -> Self {
        self.config = config;
        self
    }

    /// Whether a checkpoint is due after `step` of `steps`.
    pub(crate) fn is_due(&self, step: usize, steps: usize) -> bool {
        step == steps || (self.every > 0 && step.is_multiple_of(self.every))
    }

    /// Writes the configuration to the folder and records that the run continues after `done`
    /// steps. From now on `resume` finds it.
    pub(crate) fn begin(&self, done: usize) -> Result<(), CheckpointError> {
        let Some(folder) = &self.folder else { return Ok(()) };
        folder.resume_from(done as u64)?;
        folder.settle(self.keep)?;
        folder.write(CONFIG, self.config.as_bytes())
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Starts writing `snapshot`, after the previous one is finished. Returns completed
    /// checkpoints.
    pub(crate) fn save(&mut self, snapshot: Snapshot, worth: Worth) -> Result<Vec<Written>, CheckpointError> {
        let before = self.finish()?;
        let under_way = self.start(snapshot, worth)?;
        self.under_way = Some(under_way);
        let now = if self.in_background { None } else { self.finish()? };
        Ok(before.into_iter().chain(now).collect())
    }

    fn start(&self, snapshot: Snapshot, worth: Worth) -> Result<UnderWay, CheckpointError> {
        let (config, keep, start) = (self.config.clone(), self.keep, Instant::now());
        if let Some(comm) = &self.comm {
            let of = OfRank { folder: self.folder.clone(), path: self.path.clone(), keep, comm: comm.clone() };
            return of.start(snapshot, worth, config).map(UnderWay::Together);
        }
        let folder = self.folder.clone();
        Ok(UnderWay::Alone(std::thread::spawn(move || {
            let step = snapshot.step();
            if let Some(folder) = folder {
                folder.save(step as u64, worth, keep, |folder| snapshot.write(folder, worth, &config).map(drop))?;
            }
            Ok(Written { step, worth, took: start.elapsed() })
        })))
    }

    /// Returns a completed checkpoint, if any, without waiting.
    pub(crate) fn poll(&mut self) -> Result<Option<Written>, CheckpointError> {
        let is_finished = match &self.under_way {
            None => false,
            Some(UnderWay::Alone(thread)) => thread.is_finished(),
            Some(UnderWay::Together(together)) => together.is_finished()?,
        };
        if is_finished { self.finish() } else { Ok(None) }
    }

    /// Waits for the checkpoint being written.
    pub(crate) fn finish(&mut self) -> Result<Option<Written>, CheckpointError> {
        match self.under_way.take() {
            None => Ok(None),
            Some(UnderWay::Together(together)) => together.finish().map(Some),
            Some(UnderWay::Alone(thread)) => match thread.join() {
                Ok(written) => written.map(Some),
                Err(panic) => std::panic::resume_unwind(panic),
            },
        }
    }
}

impl Drop for Checkpoints {
    /// Completes the last checkpoint of a single process after an error.
    fn drop(&mut self) {
        if let Some(UnderWay::Alone(thread)) = self.under_way.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    fn section(folder: &Path) -> CheckpointSection {
        CheckpointSection { folder: Some(folder.into()), ..CheckpointSection::default() }
    }

    fn no_assets(_: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }

    #[test]
    fn what_is_being_written_is_finished_when_a_run_fails() {
        let dir = tempfile::tempdir().unwrap();
        let mut checkpoints = Checkpoints::new(&section(dir.path()), String::new(), true, no_assets).unwrap().unwrap();
        let is_written = Arc::new(AtomicBool::new(false));
        let written = is_written.clone();
        checkpoints.under_way = Some(UnderWay::Alone(std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            written.store(true, Ordering::SeqCst);
            Ok(Written { step: 1, worth: Worth::HeldOutLoss(None), took: Duration::ZERO })
        })));
        drop(checkpoints);
        assert!(is_written.load(Ordering::SeqCst));
    }

    #[test]
    fn a_folder_whose_assets_fail_holds_no_run() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join(CONFIG);
        let first = Checkpoints::new(&section(dir.path()), "of another model".into(), true, no_assets).unwrap();
        first.unwrap().begin(0).unwrap();
        assert!(config.exists());
        let failed = Checkpoints::new(&section(dir.path()), String::new(), true, |folder| {
            Err(CheckpointError::NoRun { folder: folder.into() })
        });
        assert!(matches!(failed, Err(CheckpointError::NoRun { .. })));
        assert!(!config.exists());
    }
}
