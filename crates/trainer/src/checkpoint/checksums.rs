//! Checksums of the files in a folder, which detect damage before anything is read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::{ASSETS, cannot};
use crate::hf::is_asset;
use crate::{atomic, digest, files};

pub(super) const CHECKSUMS: &str = "checksums.json";

/// A file's length and SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Checksum {
    bytes: u64,
    sha256: String,
}

impl Checksum {
    pub(super) fn of(path: &Path) -> Result<Self> {
        let (bytes, sha256) = digest::of_file(path).with_context(cannot("read", path))?;
        Ok(Self { bytes, sha256 })
    }
}

/// Checksums of files, by name.
pub(super) type Checksums = BTreeMap<String, Checksum>;

/// Contents of `checksums.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) validation_loss: Option<f64>,
    pub(super) files: Checksums,
}

impl Manifest {
    pub(super) fn read(folder: &Path) -> io::Result<Self> {
        Ok(serde_json::from_str(&files::read_to_string(&folder.join(CHECKSUMS))?)?)
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(CHECKSUMS);
        atomic::replace_json(&path, self).with_context(cannot("write", &path))
    }
}

pub(super) fn names(folder: &Path) -> Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    match fs::read_dir(folder).and_then(|entries| entries.map(name).collect()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(vec![]),
        names => names.with_context(cannot("read", folder)),
    }
}

pub(super) fn listed(steps: &[u64]) -> String {
    let steps: Vec<_> = steps.iter().map(u64::to_string).collect();
    format!("step {}", steps.join(", "))
}

/// Verifies the checksums of a run's assets.
///
/// # Errors
/// A file is damaged or cannot be read.
pub(crate) fn verify_assets(folder: &Path) -> Result<()> {
    let assets = folder.join(ASSETS);
    if assets.exists() { verify(&assets, is_asset, &[]) } else { Ok(()) }
}

/// Verifies the checksums of the files in a folder. Every file that may be read must have one.
pub(super) fn verify(folder: &Path, is_read: impl Fn(&str) -> bool, others: &[u64]) -> Result<()> {
    let damaged = |name: &str, reason: String| {
        let advice = match others {
            [] => "There is no copy of it".into(),
            steps => format!("There are checkpoints of {}: `--from-step N` takes one of them", listed(steps)),
        };
        anyhow!("{} is damaged: {reason}. {advice}", folder.join(name).display())
    };
    let manifest = Manifest::read(folder).map_err(|error| damaged(CHECKSUMS, error.to_string()))?;
    if let Some(name) = names(folder)?.iter().find(|name| is_read(name) && !manifest.files.contains_key(*name)) {
        return Err(damaged(name, format!("{CHECKSUMS} does not list it")));
    }
    // Checks all lengths before any content.
    for (name, Checksum { bytes, .. }) in &manifest.files {
        let file = folder.join(name);
        let found = match files::open(&file).and_then(|file| file.metadata()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(damaged(name, "it is missing".into())),
            found => found.with_context(cannot("read", &file))?.len(),
        };
        if found != *bytes {
            return Err(damaged(name, format!("it has {found} bytes, {bytes} were written")));
        }
    }
    for (name, expected) in &manifest.files {
        if Checksum::of(&folder.join(name))? != *expected {
            return Err(damaged(name, "its SHA-256 is not that of what was written".into()));
        }
    }
    Ok(())
}

/// Checksums of all files in a folder.
pub(super) fn checksums(folder: &Path) -> Result<Checksums> {
    names(folder)?.into_iter().map(|name| Ok((name.clone(), Checksum::of(&folder.join(name))?))).collect()
}
