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
//! FOLDER/BEST                     the name of the one with the smallest held-out loss, and the loss
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::sharded_tensors::INDEX;
use super::rollback::{self, resumed_from};
use super::state::STATE;
use super::{ASSETS, CONFIG, CheckpointError};
use crate::atomic::{self, PARTIAL};
use crate::digest;
use crate::file_lock::FileLock;
use crate::files;
use crate::hf::is_asset;

const CHECKSUMS: &str = "checksums.json";
const STEP: &str = "step-";
/// Lock file of a run's process.
pub(super) const LOCK: &str = "LOCK";
const DIVERGED: &str = "diverged-";
/// Prefixes of temporary files and folders.
const OURS: [&str; 8] =
    [".step-", ".diverged-", ".assets", ".config.toml", ".metrics.jsonl", ".LATEST", ".BEST", ".RESUMED_FROM"];

type Result<T> = std::result::Result<T, CheckpointError>;

/// Selection of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// The newest.
    #[default]
    Latest,
    /// The checkpoint with the smallest held-out loss.
    Best,
    /// The checkpoint after this step.
    Step(u64),
}

/// Kind of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Worth {
    /// A regular checkpoint with its held-out loss, if anything is held out.
    HeldOutLoss(Option<f64>),
    /// A diverged state, kept for inspection.
    Diverged,
}

/// A checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Completed optimizer steps.
    pub step: usize,
    /// Its kind.
    pub worth: Worth,
    /// Time from the first tensor to the last rename.
    pub took: Duration,
}

/// A file's length and SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Checksum {
    bytes: u64,
    sha256: String,
}

/// Contents of `checksums.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    held_out_loss: Option<f64>,
    files: BTreeMap<String, Checksum>,
}

impl Manifest {
    fn read(checkpoint: &Path) -> io::Result<Self> {
        Ok(serde_json::from_str(&files::read_to_string(&checkpoint.join(CHECKSUMS))?)?)
    }
}

/// Checkpoint folder, locked for writing by this process.
#[derive(Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    _lock: FileLock,
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |source| CheckpointError::Io { doing, path, source }
}

fn name_of(step: u64) -> String {
    format!("{STEP}{step:09}")
}

/// Steps of the checkpoints in a folder whose names begin with `kind`. Folders without our files
/// are ignored.
fn steps_of(folder: &Path, kind: &str) -> Result<impl Iterator<Item = u64>> {
    let is_ours = move |name: &String| [CHECKSUMS, STATE].iter().any(|file| folder.join(name).join(file).exists());
    Ok(names(folder)?.into_iter().filter(is_ours).filter_map(move |name| {
        let step: u64 = name.strip_prefix(kind)?.parse().ok()?;
        (name == format!("{kind}{step:09}")).then_some(step)
    }))
}

fn partial_name(name: &str) -> String {
    format!(".{name}{PARTIAL}")
}

fn checkpoint_name(step: u64, worth: Worth) -> String {
    match worth {
        Worth::HeldOutLoss(_) => name_of(step),
        Worth::Diverged => format!("{DIVERGED}{step:09}"),
    }
}

/// Temporary folder of a checkpoint until it is complete.
pub(super) fn under_way(folder: &Path, step: u64, worth: Worth) -> PathBuf {
    folder.join(partial_name(&checkpoint_name(step, worth)))
}

pub(super) fn checksum(path: &Path) -> Result<Checksum> {
    let (bytes, sha256) = digest::of_file(path).map_err(io_error("read", path))?;
    Ok(Checksum { bytes, sha256 })
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.map_err(io_error("read", folder))?,
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    names.collect::<io::Result<_>>().map_err(io_error("read", folder))
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(io_error("remove", path))
}

/// Steps with a checkpoint in `folder`, in order; empty if the folder does not exist.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn saved_steps(folder: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<_> = steps_of(folder, STEP)?.collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Whether a step still counts: after a resume from an earlier checkpoint, later ones do not.
fn is_kept(folder: &Path) -> impl Fn(&u64) -> bool {
    let back = resumed_from(folder);
    move |step| back.is_none_or(|back| *step <= back)
}

/// Last step at which a run in `folder` diverged, if any.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn diverged_step(folder: &Path) -> Result<Option<u64>> {
    Ok(steps_of(folder, DIVERGED)?.max())
}

/// Name in the file LATEST; `None` if no checkpoint was written.
pub fn noted_latest(folder: &Path) -> Option<String> {
    Some(files::read_to_string(&folder.join("LATEST")).ok()?.trim().to_string())
}

/// Step and loss of the checkpoint with the smallest held-out loss; the first if several are equal.
/// Checkpoints dropped by a resume from an earlier one do not count.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn best(folder: &Path) -> Result<Option<(u64, f64)>> {
    let mut best: Option<(u64, f64)> = None;
    for step in saved_steps(folder)?.into_iter().filter(is_kept(folder)) {
        // A damaged checkpoint is skipped.
        let Ok(manifest) = Manifest::read(&folder.join(name_of(step))) else { continue };
        if let Some(loss) = manifest.held_out_loss.filter(|loss| best.is_none_or(|(_, best)| *loss < best)) {
            best = Some((step, loss));
        }
    }
    Ok(best)
}

/// Path of a checkpoint, after verifying all of its files.
///
/// # Errors
/// [`CheckpointError::Missing`], [`CheckpointError::Damaged`], [`CheckpointError::Io`].
pub fn find_checkpoint(folder: &Path, which: Which) -> Result<PathBuf> {
    // Does not read LATEST: a crash may have come between the rename and its update.
    let have = saved_steps(folder)?;
    let (found, wanted) = match which {
        Which::Latest => (have.iter().copied().rfind(is_kept(folder)), "newest".into()),
        Which::Best => (best(folder)?.map(|(step, _)| step), "best".into()),
        Which::Step(step) => (have.contains(&step).then_some(step), format!("step {step}")),
    };
    let Some(step) = found else {
        return Err(CheckpointError::Missing { folder: folder.into(), wanted, have });
    };
    let path = folder.join(name_of(step));
    let is_read = |name: &str| [STATE, CONFIG, INDEX].contains(&name) || name.ends_with(".safetensors");
    verify(&path, is_read, have.into_iter().filter(|other| *other != step).collect())?;
    Ok(path)
}

/// Verifies the checksums of a run's assets.
///
/// # Errors
/// [`CheckpointError::Damaged`], [`CheckpointError::Io`].
pub(crate) fn verify_assets(folder: &Path) -> Result<()> {
    let assets = folder.join(ASSETS);
    if assets.exists() { verify(&assets, is_asset, vec![]) } else { Ok(()) }
}

/// Verifies the checksums of the files in a folder. Every file that may be read must have one.
fn verify(folder: &Path, is_read: impl Fn(&str) -> bool, have: Vec<u64>) -> Result<()> {
    let damaged =
        |file: &Path, reason: String| CheckpointError::Damaged { path: file.into(), reason, have: have.clone() };
    let list = folder.join(CHECKSUMS);
    let manifest = Manifest::read(folder).map_err(|error| damaged(&list, error.to_string()))?;
    if let Some(name) = names(folder)?.iter().find(|name| is_read(name) && !manifest.files.contains_key(*name)) {
        return Err(damaged(&folder.join(name), format!("{CHECKSUMS} does not list it")));
    }
    // Checks all lengths before any content.
    for (name, expected) in &manifest.files {
        let file = folder.join(name);
        let found = match files::open(&file).and_then(|file| file.metadata()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(&file, "it is missing".into()));
            }
            found => found.map_err(io_error("read", &file))?.len(),
        };
        if found != expected.bytes {
            return Err(damaged(&file, format!("it has {found} bytes, {} were written", expected.bytes)));
        }
    }
    for (name, expected) in manifest.files {
        let file = folder.join(name);
        if checksum(&file)? != expected {
            return Err(damaged(&file, "its SHA-256 is not that of what was written".into()));
        }
    }
    Ok(())
}

impl CheckpointFolder {
    /// Opens or creates the folder, and removes temporary files of interrupted runs.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`], [`CheckpointError::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        fs::create_dir_all(&path).map_err(io_error("make", &path))?;
        let lock = path.join(LOCK);
        let Some(lock) = FileLock::try_take(&lock).map_err(io_error("lock", &lock))? else {
            return Err(CheckpointError::Locked { folder: path });
        };
        // Files of other programs may have the same ending.
        let is_ours = |name: &String| OURS.iter().any(|ours| name.starts_with(ours)) && name.ends_with(PARTIAL);
        for name in names(&path)?.iter().filter(|name| is_ours(name)) {
            remove(&path.join(name))?;
        }
        Ok(Self { path, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a small file of the run atomically.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        atomic::replace(&path, bytes).map_err(io_error("write", &path))
    }

    /// Removes a file of the run, if it exists.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn remove_file(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_error("remove", &self.path.join(name))),
        }
    }

    /// Records that the run continues after `step`, if there are later checkpoints. These no longer
    /// count.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn resume_from(&self, step: u64) -> Result<()> {
        match saved_steps(&self.path)?.into_iter().any(|later| later > step) {
            true => self.write(rollback::NOTE, format!("{step}\n").as_bytes()),
            false => self.remove_file(rollback::NOTE),
        }
    }

    /// Creates the folder `name`, replacing an existing one: `write` fills an empty folder, then
    /// checksums are added.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], or the error of `write`.
    pub fn write_folder<E: From<CheckpointError>>(
        &self,
        name: &str,
        write: impl FnOnce(&Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let partial = self.partial(name)?;
        let written = write(&partial).and_then(|()| {
            write_manifest(&partial, None, checksums(&partial)?)?;
            self.retire(name)?;
            Ok(publish(&partial, &self.path.join(name))?)
        });
        written.inspect_err(|_| discard(&partial))
    }

    /// Writes the checkpoint of `step`: `write` puts files into an empty folder. When it is
    /// complete, old checkpoints are removed, except the newest `keep` and the best. Checkpoints of
    /// later steps, left by a resume from an earlier one, are removed too.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], or the error of `write`; existing checkpoints are then unchanged.
    pub fn save<E: From<CheckpointError>>(
        &self,
        step: u64,
        worth: Worth,
        keep: usize,
        write: impl FnOnce(&Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let partial = self.begin(step, worth)?;
        let written = write(&partial).and_then(|()| Ok(self.commit(step, worth, keep, checksums(&partial)?)?));
        written.inspect_err(|_| discard(&partial))
    }

    /// Creates an empty folder for the files of a checkpoint, which this process or others write.
    pub(super) fn begin(&self, step: u64, worth: Worth) -> Result<PathBuf> {
        self.partial(&checkpoint_name(step, worth))
    }

    /// Completes [`save`](Self::save) when all files are written.
    pub(super) fn commit(&self, step: u64, worth: Worth, keep: usize, files: BTreeMap<String, Checksum>) -> Result<()> {
        let (name, partial) = (checkpoint_name(step, worth), under_way(&self.path, step, worth));
        let held_out_loss = if let Worth::HeldOutLoss(loss) = worth { loss } else { None };
        write_manifest(&partial, held_out_loss, files)?;
        if worth == Worth::Diverged {
            self.retire(&name)?;
        } else {
            // Before the rename: a run resumes from the newest checkpoint.
            let first = resumed_from(&self.path).map_or(step, |back| step.min(back + 1));
            let steps = saved_steps(&self.path)?.into_iter().filter(|other| *other >= first);
            steps.rev().try_for_each(|step| self.retire(&name_of(step)))?;
            self.remove_file(rollback::NOTE)?;
        }
        let path = self.path.join(&name);
        if path.symlink_metadata().is_ok() {
            // Another program created it, so its content is moved and not removed.
            let aside = self.path.join(format!("not-of-this-run-{name}-{}", std::process::id()));
            fs::rename(&path, &aside).map_err(io_error("rename", &path))?;
        }
        publish(&partial, &path)?;
        if worth == Worth::Diverged { Ok(()) } else { self.settle(keep) }
    }

    /// Updates LATEST and BEST, and removes old checkpoints. A resumed run also does this for a run
    /// that was killed.
    ///
    /// Nothing is removed while a run resumed from an earlier checkpoint has no new one.
    pub(super) fn settle(&self, keep: usize) -> Result<()> {
        let (have, best) = (saved_steps(&self.path)?, best(&self.path)?);
        if let Some(newest) = have.iter().copied().rfind(is_kept(&self.path)) {
            self.write("LATEST", format!("{}\n", name_of(newest)).as_bytes())?;
        }
        if let Some((step, loss)) = best {
            self.write("BEST", format!("{}\n{loss:?}\n", name_of(step)).as_bytes())?;
        }
        if resumed_from(&self.path).is_some() {
            return Ok(());
        }
        let old = have.into_iter().rev().skip(keep.max(1)).filter(|step| best.is_none_or(|(best, _)| *step != best));
        old.into_iter().try_for_each(|step| self.retire(&name_of(step)))
    }

    fn partial(&self, name: &str) -> Result<PathBuf> {
        let partial = self.path.join(partial_name(name));
        if partial.symlink_metadata().is_ok() {
            remove(&partial)?;
        }
        fs::create_dir(&partial).map_err(io_error("make", &partial))?;
        Ok(partial)
    }

    /// Removes a checkpoint, if it exists. It is renamed first, so that a partly removed checkpoint
    /// is never taken for a complete one.
    fn retire(&self, name: &str) -> Result<()> {
        let (path, partial) = (self.path.join(name), self.path.join(format!(".{name}.old{PARTIAL}")));
        match fs::rename(&path, &partial) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            renamed => renamed.map_err(io_error("remove", &path)).and_then(|()| remove(&partial)),
        }
    }
}

fn publish(partial: &Path, path: &Path) -> Result<()> {
    atomic::publish(partial, path).map_err(io_error("complete", path))
}

/// Ignores errors: the first error is reported, and the next run removes the rest.
pub(super) fn discard(partial: &Path) {
    let _ = fs::remove_dir_all(partial);
}

/// Checksums of all files in a folder.
fn checksums(folder: &Path) -> Result<BTreeMap<String, Checksum>> {
    names(folder)?.into_iter().map(|name| Ok((name.clone(), checksum(&folder.join(name))?))).collect()
}

fn write_manifest(folder: &Path, held_out_loss: Option<f64>, files: BTreeMap<String, Checksum>) -> Result<()> {
    let path = folder.join(CHECKSUMS);
    atomic::replace_json(&path, &Manifest { held_out_loss, files }).map_err(io_error("write", &path))
}
