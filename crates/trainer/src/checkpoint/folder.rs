//! Checkpoint folder. Each checkpoint is written under a temporary name, synced and renamed, so a
//! crash always leaves the last complete one.
//!
//! ```text
//! FOLDER/LOCK                     held by the run that writes here
//! FOLDER/step-000000120/          a checkpoint: the caller's files, and checksums.json
//! FOLDER/.step-000000140.partial/ a checkpoint being written, or left by a crash
//! FOLDER/diverged-000000150/      a state that is not finite; used only if it is renamed by hand
//! FOLDER/RESUMED_FROM             an earlier step resumed from, until there is a new checkpoint
//! FOLDER/LATEST                   the name of the newest checkpoint
//! FOLDER/BEST                     the name of the one with the smallest validation loss, and the loss
//! ```

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checksums::{CHECKSUMS, Checksums, Manifest, checksums, listed, names, verify};
use super::sharded_tensors::INDEX;
use super::state::STATE;
use super::{CONFIG, cannot};
use crate::atomic::{self, PARTIAL};
use crate::file_lock::FileLock;
use crate::files;
use anyhow::{Context, Result, anyhow, bail};

const STEP: &str = "step-";
const DIVERGED: &str = "diverged-";
/// Lock file of a run's process.
pub(super) const LOCK: &str = "LOCK";
/// File with the step that the run resumed from.
const RESUMED_FROM: &str = "RESUMED_FROM";
/// Prefixes of temporary files and folders.
const OURS: [&str; 8] =
    [".step-", ".diverged-", ".assets", ".config.toml", ".metrics.jsonl", ".LATEST", ".BEST", ".RESUMED_FROM"];

/// Selection of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// The newest.
    #[default]
    Latest,
    /// The checkpoint with the smallest validation loss.
    Best,
    /// The checkpoint after this step.
    Step(u64),
}

/// Kind of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CheckpointKind {
    /// A regular checkpoint with its validation loss, if anything is held out.
    ValidationLoss(Option<f64>),
    /// A diverged state, kept for inspection.
    Diverged,
}

impl CheckpointKind {
    fn name(self, step: u64) -> String {
        match self {
            Self::ValidationLoss(_) => name_of(step),
            Self::Diverged => format!("{DIVERGED}{step:09}"),
        }
    }
}

/// A checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Completed optimizer steps.
    pub step: usize,
    /// Its kind.
    pub kind: CheckpointKind,
    /// Time from the first tensor to the last rename.
    pub took: Duration,
}

fn name_of(step: u64) -> String {
    format!("{STEP}{step:09}")
}

fn partial_name(name: &str) -> String {
    format!(".{name}{PARTIAL}")
}

/// Temporary folder of a checkpoint until it is complete.
pub(super) fn under_way(folder: &Path, step: u64, kind: CheckpointKind) -> PathBuf {
    folder.join(partial_name(&kind.name(step)))
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.with_context(cannot("remove", path))
}

/// Steps of the checkpoints in a folder whose names begin with `kind`, in order. Folders without
/// our files are ignored.
fn steps_of(folder: &Path, kind: &str) -> Result<Vec<u64>> {
    let step_of = |name: String| {
        let step: u64 = name.strip_prefix(kind)?.parse().ok()?;
        let is_ours = [CHECKSUMS, STATE].iter().any(|file| folder.join(&name).join(file).exists());
        (is_ours && name == format!("{kind}{step:09}")).then_some(step)
    };
    let mut steps: Vec<_> = names(folder)?.into_iter().filter_map(step_of).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Steps with a checkpoint in `folder`, in order; empty if the folder does not exist.
///
/// # Errors
/// The folder cannot be read.
pub fn saved_steps(folder: &Path) -> Result<Vec<u64>> {
    steps_of(folder, STEP)
}

/// Last step at which a run in `folder` diverged, if any.
///
/// # Errors
/// The folder cannot be read.
pub fn diverged_step(folder: &Path) -> Result<Option<u64>> {
    Ok(steps_of(folder, DIVERGED)?.pop())
}

/// Step that the run in `folder` resumed from, if it has no new checkpoint since. Checkpoints of
/// later steps no longer count.
fn resumed_from(folder: &Path) -> Option<u64> {
    files::read_to_string(&folder.join(RESUMED_FROM)).ok()?.trim().parse().ok()
}

/// Saved steps that count.
fn kept_steps(folder: &Path) -> Result<Vec<u64>> {
    let back = resumed_from(folder).unwrap_or(u64::MAX);
    Ok(saved_steps(folder)?.into_iter().filter(|step| *step <= back).collect())
}

/// Name in the file LATEST; `None` if no checkpoint was written.
pub fn noted_latest(folder: &Path) -> Option<String> {
    Some(files::read_to_string(&folder.join("LATEST")).ok()?.trim().to_string())
}

/// Step and loss of the checkpoint with the smallest validation loss; the first if several are equal.
/// Checkpoints dropped by a resume from an earlier one do not count.
///
/// # Errors
/// The folder cannot be read.
pub fn best(folder: &Path) -> Result<Option<(u64, f64)>> {
    // A damaged checkpoint is skipped.
    let loss = |step| Some((step, Manifest::read(&folder.join(name_of(step))).ok()?.validation_loss?));
    Ok(kept_steps(folder)?.into_iter().filter_map(loss).min_by(|(_, one), (_, other)| one.total_cmp(other)))
}

/// Error for a checkpoint that does not exist. `wanted` is `newest`, `best`, the step, or the name
/// in LATEST.
pub(crate) fn missing(folder: &Path, wanted: &str, have: &[u64]) -> anyhow::Error {
    let have = if have.is_empty() { "none".into() } else { listed(have) };
    anyhow!("{} has no checkpoint `{wanted}`; there are {have}", folder.display())
}

/// Path of a checkpoint, after verifying all of its files.
///
/// # Errors
/// There is no such checkpoint; a file is damaged or cannot be read.
pub fn find_checkpoint(folder: &Path, which: Which) -> Result<PathBuf> {
    // Does not read LATEST: a crash may have come between the rename and its update.
    let mut have = saved_steps(folder)?;
    let (found, wanted) = match which {
        Which::Latest => (kept_steps(folder)?.pop(), "newest".into()),
        Which::Best => (best(folder)?.map(|(step, _)| step), "best".into()),
        Which::Step(step) => (have.contains(&step).then_some(step), format!("step {step}")),
    };
    let step = found.ok_or_else(|| missing(folder, &wanted, &have))?;
    have.retain(|other| *other != step);
    let path = folder.join(name_of(step));
    let is_read = |name: &str| [STATE, CONFIG, INDEX].contains(&name) || name.ends_with(".safetensors");
    verify(&path, is_read, &have)?;
    Ok(path)
}

/// Checkpoint folder, locked for writing by this process.
#[derive(Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    _lock: FileLock,
}

impl CheckpointFolder {
    /// Opens or creates the folder, and removes temporary files of interrupted runs.
    ///
    /// # Errors
    /// Another run is writing to the folder; it cannot be written.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        fs::create_dir_all(&path).with_context(cannot("make", &path))?;
        let lock = path.join(LOCK);
        let Some(lock) = FileLock::try_take(&lock).with_context(cannot("lock", &lock))? else {
            let folder = path.display();
            bail!("another run is writing to {folder}: wait for it or stop it, or give this one another --output-dir");
        };
        // Files of other programs may have the same ending.
        let is_ours = |name: &String| OURS.iter().any(|ours| name.starts_with(ours)) && name.ends_with(PARTIAL);
        names(&path)?.iter().filter(|name| is_ours(name)).try_for_each(|name| remove(&path.join(name)))?;
        Ok(Self { path, _lock: lock })
    }

    /// Writes a small file of the run atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        atomic::replace(&path, text.as_bytes()).with_context(cannot("write", &path))
    }

    /// Removes a file of the run, if it exists.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove_file(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.with_context(cannot("remove", &path)),
        }
    }

    /// Records that the run continues after `step`, if there are later checkpoints. These no longer
    /// count.
    ///
    /// # Errors
    /// The folder cannot be read or written.
    pub fn resume_from(&self, step: u64) -> Result<()> {
        match saved_steps(&self.path)?.last() {
            Some(last) if *last > step => self.write(RESUMED_FROM, &format!("{step}\n")),
            _ => self.remove_file(RESUMED_FROM),
        }
    }

    /// Creates the folder `name`, replacing an existing one: `write` fills an empty folder, then
    /// checksums are added.
    ///
    /// # Errors
    /// The error of `write`; the folder cannot be written.
    pub fn write_folder(&self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let partial = self.partial(name)?;
        let written = write(&partial).and_then(|()| {
            Manifest { validation_loss: None, files: checksums(&partial)? }.write(&partial)?;
            self.retire(name)?;
            publish(&partial, &self.path.join(name))
        });
        written.inspect_err(|_| discard(&partial))
    }

    /// Writes the checkpoint of `step`: `write` puts files into an empty folder. When it is
    /// complete, old checkpoints are removed, except the newest `keep` and the best. Checkpoints of
    /// later steps, left by a resume from an earlier one, are removed too.
    ///
    /// # Errors
    /// The error of `write`; the folder cannot be written. Existing checkpoints are then unchanged.
    pub fn save(
        &self,
        step: u64,
        kind: CheckpointKind,
        keep: usize,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let partial = self.begin(step, kind)?;
        let written = write(&partial).and_then(|()| self.commit(step, kind, keep, checksums(&partial)?));
        written.inspect_err(|_| discard(&partial))
    }

    /// Creates an empty folder for the files of a checkpoint, which this process or others write.
    pub(super) fn begin(&self, step: u64, kind: CheckpointKind) -> Result<PathBuf> {
        self.partial(&kind.name(step))
    }

    /// Completes [`save`](Self::save) when all files are written.
    pub(super) fn commit(&self, step: u64, kind: CheckpointKind, keep: usize, files: Checksums) -> Result<()> {
        let (name, partial) = (kind.name(step), under_way(&self.path, step, kind));
        let (path, is_diverged) = (self.path.join(&name), kind == CheckpointKind::Diverged);
        let validation_loss = if let CheckpointKind::ValidationLoss(loss) = kind { loss } else { None };
        Manifest { validation_loss, files }.write(&partial)?;
        if is_diverged {
            self.retire(&name)?;
        } else {
            // Before the rename: a run resumes from the newest checkpoint.
            let first = resumed_from(&self.path).map_or(step, |back| step.min(back + 1));
            let mut dropped = saved_steps(&self.path)?.into_iter().rev().filter(|other| *other >= first);
            dropped.try_for_each(|step| self.retire(&name_of(step)))?;
            self.remove_file(RESUMED_FROM)?;
        }
        if path.symlink_metadata().is_ok() {
            // Another program created it, so its content is moved and not removed.
            let aside = self.path.join(format!("not-of-this-run-{name}-{}", std::process::id()));
            fs::rename(&path, aside).with_context(cannot("rename", &path))?;
        }
        publish(&partial, &path)?;
        if is_diverged { Ok(()) } else { self.settle(keep) }
    }

    /// Updates LATEST and BEST, and removes old checkpoints. A resumed run also does this for a run
    /// that was killed.
    ///
    /// Nothing is removed while a run resumed from an earlier checkpoint has no new one.
    pub(super) fn settle(&self, keep: usize) -> Result<()> {
        let best = best(&self.path)?;
        if let Some(newest) = kept_steps(&self.path)?.pop() {
            self.write("LATEST", &format!("{}\n", name_of(newest)))?;
        }
        if let Some((step, loss)) = best {
            self.write("BEST", &format!("{}\n{loss:?}\n", name_of(step)))?;
        }
        if resumed_from(&self.path).is_some() {
            return Ok(());
        }
        let old = saved_steps(&self.path)?.into_iter().rev().skip(keep.max(1));
        old.filter(|step| best.is_none_or(|(best, _)| *step != best)).try_for_each(|step| self.retire(&name_of(step)))
    }

    fn partial(&self, name: &str) -> Result<PathBuf> {
        let partial = self.path.join(partial_name(name));
        if partial.symlink_metadata().is_ok() {
            remove(&partial)?;
        }
        fs::create_dir(&partial).with_context(cannot("make", &partial))?;
        Ok(partial)
    }

    /// Removes a checkpoint, if it exists. It is renamed first, so that a partly removed checkpoint
    /// is never taken for a complete one.
    fn retire(&self, name: &str) -> Result<()> {
        let (path, partial) = (self.path.join(name), self.path.join(format!(".{name}.old{PARTIAL}")));
        match fs::rename(&path, &partial) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            renamed => renamed.with_context(cannot("remove", &path)).and_then(|()| remove(&partial)),
        }
    }
}

fn publish(partial: &Path, path: &Path) -> Result<()> {
    atomic::publish(partial, path).with_context(cannot("complete", path))
}

/// Ignores errors: the first error is reported, and the next run removes the rest.
pub(super) fn discard(partial: &Path) {
    let _ = fs::remove_dir_all(partial);
}
