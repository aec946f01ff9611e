//! [`Checkpoints`]: writes a run's checkpoints one at a time, optionally in the background.
//!
//! Of several ranks each writes its files, and the first completes the checkpoint when all files
//! are written. Files are written while training continues, but ranks communicate only between two
//! steps.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use float8_shard::Communicator;
use serde::{Deserialize, Serialize};

use super::checksums::{Checksum, Checksums};
use super::folder::{LOCK, discard, under_way};
use super::sharded_tensors::{INDEX, Index, Parts};
use super::state::Snapshot;
use super::{ASSETS, CONFIG, CheckpointFolder, CheckpointKind, Written, diverged_step, saved_steps};
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
    writing: Option<Writing>,
}

/// A checkpoint being written.
#[derive(Debug)]
struct Writing {
    step: usize,
    kind: CheckpointKind,
    start: Instant,
    /// Returns its piece and the time that it took.
    thread: JoinHandle<Result<(Piece, Duration)>>,
}

/// Parts of tensors and files written by a rank.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Piece {
    parts: Parts,
    files: Checksums,
}

impl Piece {
    fn write(snapshot: &Snapshot, folder: &Path, kind: CheckpointKind, config: &str) -> Result<Self> {
        let parts = snapshot.write(folder, kind, config)?;
        let files = snapshot.files().into_iter().map(|name| Ok((name.clone(), Checksum::of(&folder.join(name))?)));
        Ok(Self { parts, files: files.collect::<Result<_>>()? })
    }
}

impl Checkpoints {
    /// Prepares checkpoints of a run over the ranks of `comm`, if `section` has a folder. A new run
    /// needs a folder without a run. `assets` writes the files that `resume` and `export` need from
    /// other folders.
    ///
    /// Of several ranks each writes its files, then the first completes the checkpoint. All ranks
    /// must save and wait at the same steps.
    ///
    /// # Errors
    /// Another run holds the folder, or it has files of another one; the error of `assets`.
    pub fn new(
        section: &CheckpointSection,
        comm: &Communicator,
        is_new: bool,
        assets: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Option<Self>> {
        let CheckpointSection { output_dir: folder, save_steps: every, save_total_limit: keep, background } = section;
        let Some(path) = folder.clone() else { return Ok(None) };
        let folder = (comm.rank() == 0).then(|| open(&path, is_new, assets)).transpose()?.map(Arc::new);
        let comm = Some(comm.clone()).filter(|comm| comm.world_size() > 1);
        let (config, every, keep, in_background) = (String::new(), *every, *keep, *background);
        Ok(Some(Self { path, folder, config, keep, every, in_background, comm, writing: None }))
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
    pub(crate) fn begin(&self, done: usize) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        folder.resume_from(done as u64)?;
        folder.settle(self.keep)?;
        folder.write(CONFIG, &self.config)
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Starts writing `snapshot`, after the previous one is finished. Returns completed
    /// checkpoints. All ranks call it.
    pub(crate) fn save(&mut self, snapshot: Snapshot, kind: CheckpointKind) -> Result<Vec<Written>> {
        let before = self.finish()?;
        let (start, step) = (Instant::now(), snapshot.step());
        let (folder, config, keep) = (self.folder.clone(), self.config.clone(), self.keep);
        let partial = under_way(&self.path, step as u64, kind);
        let is_alone = self.comm.is_none();
        if let Some(comm) = &self.comm {
            let made = folder.as_ref().map_or(Ok(()), |folder| folder.begin(step as u64, kind).map(drop));
            comm.all_ok("making a checkpoint's folder", on_one_line(made))?;
        }
        let thread = thread::spawn(move || match folder.filter(|_| is_alone) {
            None => Ok((Piece::write(&snapshot, &partial, kind, &config)?, start.elapsed())),
            Some(folder) => {
                folder.save(step as u64, kind, keep, |folder| snapshot.write(folder, kind, &config).map(drop))?;
                Ok((Piece::default(), start.elapsed()))
            }
        });
        self.writing = Some(Writing { step, kind, start, thread });
        let now = if self.in_background { None } else { self.finish()? };
        Ok(before.into_iter().chain(now).collect())
    }

    /// Returns a completed checkpoint, if any, without waiting. All ranks call it.
    pub(crate) fn poll(&mut self) -> Result<Option<Written>> {
        let Some(Writing { thread, .. }) = &self.writing else { return Ok(None) };
        let is_late = match &self.comm {
            None => !thread.is_finished(),
            Some(comm) => {
                let late = vec![u32::from(!thread.is_finished())];
                comm.all_reduce_max_bits("whether a checkpoint is written", late)?.wait()?[0] > 0
            }
        };
        if is_late { Ok(None) } else { self.finish() }
    }

    /// Waits for the checkpoint being written. If a rank failed, all return an error. All ranks
    /// call it.
    pub(crate) fn finish(&mut self) -> Result<Option<Written>> {
        let Some(Writing { step, kind, start, thread }) = self.writing.take() else { return Ok(None) };
        let own = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let took = match &self.comm {
            None => own.map_err(advised)?.1,
            Some(comm) => {
                let own = own.map(|(piece, _)| piece);
                self.complete(comm, step, kind, own).inspect_err(|_| self.discard(step, kind))?;
                start.elapsed()
            }
        };
        Ok(Some(Written { step, kind, took }))
    }

    /// Completes the checkpoint on the first rank when all ranks have written their files.
    fn complete(&self, comm: &Communicator, step: usize, kind: CheckpointKind, own: Result<Piece>) -> Result<()> {
        let own = comm.all_ok("writing a checkpoint", on_one_line(own))?;
        let pieces = comm.all_gather_bytes("a checkpoint's files", &serde_json::to_vec(&own)?)?;
        let completed = self.folder.as_ref().map_or(Ok(()), |folder| {
            let (mut files, mut ranks) = (Checksums::new(), vec![]);
            for piece in &pieces {
                let piece: Piece = serde_json::from_slice(piece)?;
                files.extend(piece.files);
                ranks.push(piece.parts);
            }
            let index = Index::new(ranks).write(&under_way(&self.path, step as u64, kind))?;
            files.insert(INDEX.into(), Checksum::of(&index)?);
            folder.commit(step as u64, kind, self.keep, files)
        });
        Ok(comm.all_ok("completing a checkpoint", on_one_line(completed))?)
    }

    fn discard(&self, step: usize, kind: CheckpointKind) {
        if self.folder.is_some() {
            discard(&under_way(&self.path, step as u64, kind));
        }
    }
}

/// Opens the folder of a run. A new run gets its assets.
fn open(path: &Path, is_new: bool, assets: impl FnOnce(&Path) -> Result<()>) -> Result<CheckpointFolder> {
    if !is_new {
        return CheckpointFolder::open(path);
    }
    let foreign = [CONFIG, ASSETS, METRICS_FILE].map(|name| path.join(name)).into_iter().find(|path| path.exists());
    if let Some(foreign) = foreign.filter(|_| !path.join(LOCK).exists()) {
        let foreign = foreign.display();
        bail!(
            "{foreign} is of no run, and a run would replace it: \
             give another --output-dir, or move it away"
        );
    }
    let (folder, run) = (CheckpointFolder::open(path)?, path.display());
    if let Some(step) = saved_steps(path)?.last() {
        bail!(
            "{run} holds a run of {step} steps: `resume` continues it; \
             a new run needs another --output-dir"
        );
    }
    if let Some(step) = diverged_step(path)? {
        bail!(
            "{run} holds a run that diverged at step {step} before it had a checkpoint: give the new run another \
             checkpoint.output_dir, or remove this one"
        );
    }
    // Assets of a run that ended before its first checkpoint may belong to another model. A folder
    // without a configuration has no run.
    folder.remove_file(CONFIG)?;
    folder.write_folder(ASSETS, assets)?;
    Ok(folder)
}

impl Drop for Checkpoints {
    /// After an error, a single process completes its last checkpoint, and ranks remove theirs.
    fn drop(&mut self) {
        let Some(Writing { step, kind, thread, .. }) = self.writing.take() else { return };
        let _ = thread.join();
        if self.comm.is_some() {
            self.discard(step, kind);
        }
    }
}

/// An error with its advice and causes, for the other ranks.
fn on_one_line<T>(result: Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{:#}", advised(error)))
}

/// Adds advice to the error of a full disk. Existing checkpoints are intact.
fn advised(error: anyhow::Error) -> anyhow::Error {
    let is_full = |cause: &io::Error| {
        matches!(cause.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
    };
    if !error.chain().filter_map(|cause| cause.downcast_ref()).any(is_full) {
        return error;
    }
    error.context(
        "no room for a checkpoint: make room, or lower checkpoint.save_total_limit; \
         checkpoints that were there are whole",
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn section(folder: &Path) -> CheckpointSection {
        CheckpointSection { output_dir: Some(folder.into()), ..CheckpointSection::default() }
    }

    #[test]
    fn a_checkpoint_is_finished_when_a_run_fails() {
        let dir = tempfile::tempdir().unwrap();
        let mut checkpoints =
            Checkpoints::new(&section(dir.path()), &Communicator::solo(), true, |_| Ok(())).unwrap().unwrap();
        let is_written = Arc::new(AtomicBool::new(false));
        let written = is_written.clone();
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            written.store(true, Ordering::SeqCst);
            Ok((Piece::default(), Duration::ZERO))
        });
        let kind = CheckpointKind::ValidationLoss(None);
        checkpoints.writing = Some(Writing { step: 1, kind, start: Instant::now(), thread });
        drop(checkpoints);
        assert!(is_written.load(Ordering::SeqCst));
    }

    #[test]
    fn a_folder_whose_assets_fail_holds_no_run() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join(CONFIG);
        let new = |assets: fn(&Path) -> Result<()>| {
            Checkpoints::new(&section(dir.path()), &Communicator::solo(), true, assets)
        };
        new(|_| Ok(())).unwrap().unwrap().begin(0).unwrap();
        assert!(config.exists());
        let error = new(|_| bail!("no assets")).unwrap_err();
        assert_eq!(error.to_string(), "no assets");
        assert!(!config.exists());
    }
}
