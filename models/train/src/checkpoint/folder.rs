//! A folder of checkpoints: each written beside, synced and renamed, so that a run that dies at any moment leaves the last whole one.
//!
//! ```text
//! FOLDER/LOCK                     held by the run that writes here
//! FOLDER/step-000000120/          a checkpoint: what the caller writes, and checksums.json
//! FOLDER/.step-000000140.partial/ one under way, or what is left of one
//! FOLDER/diverged-000000150/      what has left the finite numbers; never resumed from unless it is moved by hand
//! FOLDER/RESUMED_FROM             the step that a run went back to, until it has a new checkpoint
//! FOLDER/LATEST, BEST             the name of the newest checkpoint, and of the one with the smallest held-out loss, with the loss
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::parts::INDEX;
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
/// The file that a run's process holds.
pub(super) const LOCK: &str = "LOCK";
const DIVERGED: &str = "diverged-";
/// What the names of files and folders under way begin with.
const OURS: [&str; 8] =
    [".step-", ".diverged-", ".assets", ".config.toml", ".metrics.jsonl", ".LATEST", ".BEST", ".RESUMED_FROM"];

type Result<T> = std::result::Result<T, CheckpointError>;

/// Which checkpoint of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// The newest.
    #[default]
    Latest,
    /// The checkpoint with the smallest held-out loss.
    Best,
    /// The checkpoint after so many steps.
    Step(u64),
}

/// What a checkpoint is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Worth {
    /// This held-out loss, if anything is held out.
    HeldOutLoss(Option<f64>),
    /// Nothing but to look at.
    Diverged,
}

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

/// A file's length and SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Checksum {
    bytes: u64,
    sha256: String,
}

/// What a checkpoint says of itself.
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

/// A folder of checkpoints that this process alone writes to.
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

/// Steps of the checkpoints in a folder whose names begin with `kind`. Folders without our files are ignored.
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

/// Where the files of a checkpoint lie until it is whole.
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

/// The steps that have a checkpoint in `folder`, in order; none if there is no such folder.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn saved_steps(folder: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<_> = steps_of(folder, STEP)?.collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Whether a step is none that a run gave up when it went back to an earlier checkpoint.
fn is_kept(folder: &Path) -> impl Fn(&u64) -> bool {
    let back = resumed_from(folder);
    move |step| back.is_none_or(|back| *step <= back)
}

/// The last step at which a run in `folder` diverged, if one did.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn diverged_step(folder: &Path) -> Result<Option<u64>> {
    Ok(steps_of(folder, DIVERGED)?.max())
}

/// The checkpoint that is noted as the newest; none if no checkpoint has been written.
pub fn noted_latest(folder: &Path) -> Option<String> {
    Some(files::read_to_string(&folder.join("LATEST")).ok()?.trim().to_string())
}

/// The step of the checkpoint with the smallest held-out loss, and that loss; of several the first. What a run that went back to an
/// earlier checkpoint has given up does not count.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn best(folder: &Path) -> Result<Option<(u64, f64)>> {
    let mut best: Option<(u64, f64)> = None;
    for step in saved_steps(folder)?.into_iter().filter(is_kept(folder)) {
        // A damaged one is not the best.
        let Ok(manifest) = Manifest::read(&folder.join(name_of(step))) else { continue };
        if let Some(loss) = manifest.held_out_loss.filter(|loss| best.is_none_or(|(_, best)| *loss < best)) {
            best = Some((step, loss));
        }
    }
    Ok(best)
}

/// Where a checkpoint lies, after all of its files have been compared with their checksums.
///
/// # Errors
/// [`CheckpointError::Missing`], [`CheckpointError::Damaged`], [`CheckpointError::Io`].
pub fn find_checkpoint(folder: &Path, which: Which) -> Result<PathBuf> {
    // Not the file LATEST: a crash may have come between a rename and the note of it.
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

/// Compares a run's assets with their checksums.
///
/// # Errors
/// [`CheckpointError::Damaged`], [`CheckpointError::Io`].
pub(crate) fn verify_assets(folder: &Path) -> Result<()> {
    let assets = folder.join(ASSETS);
    if assets.exists() { verify(&assets, is_asset, vec![]) } else { Ok(()) }
}

/// Compares the files in a folder with their checksums, which all that may be read must have.
fn verify(folder: &Path, is_read: impl Fn(&str) -> bool, have: Vec<u64>) -> Result<()> {
    let damaged =
        |file: &Path, reason: String| CheckpointError::Damaged { path: file.into(), reason, have: have.clone() };
    let list = folder.join(CHECKSUMS);
    let manifest = Manifest::read(folder).map_err(|error| damaged(&list, error.to_string()))?;
    if let Some(name) = names(folder)?.iter().find(|name| is_read(name) && !manifest.files.contains_key(*name)) {
        return Err(damaged(&folder.join(name), format!("{CHECKSUMS} does not list it")));
    }
    // All lengths before any content.
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
    /// Opens or makes the folder, and removes what interrupted runs have left half-written.
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
        // Files of other programs may end alike.
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

    /// Writes a small file of the run: either the old or the new one is there.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        atomic::replace(&path, bytes).map_err(io_error("write", &path))
    }

    /// Removes a file of the run, if it is there.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn remove_file(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_error("remove", &self.path.join(name))),
        }
    }

    /// Notes that the run goes on after `step`, if there are checkpoints of later steps: they count no more.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn resume_from(&self, step: u64) -> Result<()> {
        match saved_steps(&self.path)?.into_iter().any(|later| later > step) {
            true => self.write(rollback::NOTE, format!("{step}\n").as_bytes()),
            false => self.remove_file(rollback::NOTE),
        }
    }

    /// Makes the folder `name`, in place of one that is there: what `write` puts into an empty one, and checksums.
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

    /// Writes the checkpoint of `step`: `write` is given an empty folder and puts files into it. When it is whole, all but the newest
    /// `keep` and the best are removed, and those of later steps, which are of a run that went on from an earlier checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], or the error of `write`; the checkpoints before are as they were.
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

    /// An empty folder for the files of the checkpoint of `step`, whether by this process or others.
    pub(super) fn begin(&self, step: u64, worth: Worth) -> Result<PathBuf> {
        self.partial(&checkpoint_name(step, worth))
    }

    /// The rest of [`save`](Self::save), when all files are there.
    pub(super) fn commit(&self, step: u64, worth: Worth, keep: usize, files: BTreeMap<String, Checksum>) -> Result<()> {
        let (name, partial) = (checkpoint_name(step, worth), under_way(&self.path, step, worth));
        let held_out_loss = if let Worth::HeldOutLoss(loss) = worth { loss } else { None };
        write_manifest(&partial, held_out_loss, files)?;
        if worth == Worth::Diverged {
            self.retire(&name)?;
        } else {
            // Before the new one is there: the newest is what a run resumes from.
            let first = resumed_from(&self.path).map_or(step, |back| step.min(back + 1));
            let steps = saved_steps(&self.path)?.into_iter().filter(|other| *other >= first);
            steps.rev().try_for_each(|step| self.retire(&name_of(step)))?;
            self.remove_file(rollback::NOTE)?;
        }
        let path = self.path.join(&name);
        if path.symlink_metadata().is_ok() {
            // Another program has it, and what it holds is not ours to remove.
            let aside = self.path.join(format!("not-of-this-run-{name}-{}", std::process::id()));
            fs::rename(&path, &aside).map_err(io_error("rename", &path))?;
        }
        publish(&partial, &path)?;
        if worth == Worth::Diverged { Ok(()) } else { self.settle(keep) }
    }

    /// Notes the newest and the best checkpoint, and removes old ones. A resumed run does this for
    /// one that was killed before.
    ///
    /// Nothing is removed while a run has gone back to an earlier checkpoint.
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

    /// Removes a checkpoint, if it is there: first its name, so that no half of one is taken for a whole.
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

/// The error that led here is the one to tell; what stays is removed by the next run.
pub(super) fn discard(partial: &Path) {
    let _ = fs::remove_dir_all(partial);
}

/// The checksums of all files in a folder.
fn checksums(folder: &Path) -> Result<BTreeMap<String, Checksum>> {
    names(folder)?.into_iter().map(|name| Ok((name.clone(), checksum(&folder.join(name))?))).collect()
}

fn write_manifest(folder: &Path, held_out_loss: Option<f64>, files: BTreeMap<String, Checksum>) -> Result<()> {
    let path = folder.join(CHECKSUMS);
    atomic::replace_json(&path, &Manifest { held_out_loss, files }).map_err(io_error("write", &path))
}
