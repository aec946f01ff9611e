//! Identity of the base weights of a run that does not save them. [`keep`] records the files of a
//! Hugging Face folder, and [`check`] compares them.

use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::tensor_files::TensorFiles;
use crate::{JobError, atomic, digest, files};

/// Name of the record among the assets of a run.
pub(super) const BASE: &str = "base.json";

/// Larger files are sampled, so that a run need not read a whole model twice to begin.
const MAX_HASHED: u64 = 64 << 20;

/// A file of tensors.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BaseFile {
    bytes: u64,
    /// SHA-256 of its header: names, dtypes, shapes and offsets of tensors.
    header: String,
    /// SHA-256 of the whole file; above 64 MiB, of samples at even distances.
    sha256: String,
}

/// Files by name.
type Base = BTreeMap<String, BaseFile>;

impl BaseFile {
    fn of(path: &Path) -> io::Result<Self> {
        let mut file = files::open(path)?;
        let bytes = file.metadata()?.len();
        let mut len = [0; 8];
        file.read_exact(&mut len)?;
        // Opening the folder has checked that the header is in the file.
        let mut header = vec![0; u64::from_le_bytes(len).min(bytes) as usize];
        file.read_exact(&mut header)?;
        let header = digest::Fingerprint::default().field(header).hex();
        let sha256 = if bytes > MAX_HASHED { digest::of_samples(path)? } else { digest::of_file(path)?.1 };
        Ok(Self { bytes, header, sha256 })
    }

    /// How `now` differs from this file, if it does.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.header != now.header {
            Some("its header lists other tensors".into())
        } else if self.bytes != now.bytes {
            Some(format!("it had {} bytes, now it has {}", self.bytes, now.bytes))
        } else {
            (self.sha256 != now.sha256).then(|| "it has the same tensors with other values".into())
        }
    }
}

/// Records of the tensor files of a folder.
fn of_folder(folder: &Path) -> Result<Base, JobError> {
    let of_file = |path: &Path| {
        let name = path.strip_prefix(folder).unwrap_or(path).display().to_string();
        let file = BaseFile::of(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((name, file))
    };
    TensorFiles::open_folder(folder)?.paths().map(of_file).collect()
}

/// Records the tensor files of `folder` in the folder `assets`.
///
/// # Errors
/// [`JobError::TensorFiles`], [`JobError::Io`], [`JobError::Write`].
pub(crate) fn keep(folder: &Path, assets: &Path) -> Result<(), JobError> {
    let path = assets.join(BASE);
    atomic::replace_json(&path, &of_folder(folder)?).with_context(|| format!("cannot write {}", path.display()))
}

/// Compares the tensor files of `folder` with the record that [`keep`] made. Returns false if there
/// is none, as in earlier versions.
///
/// # Errors
/// [`JobError::Base`] for the first file that differs; [`JobError::TensorFiles`], [`JobError::Io`],
/// [`JobError::Json`].
pub(crate) fn check(folder: &Path, assets: &Path) -> Result<bool, JobError> {
    let kept = assets.join(BASE);
    let text = match files::read(&kept) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        text => text.with_context(|| format!("cannot read {}", kept.display()))?,
    };
    let then: Base = serde_json::from_slice(&text).with_context(|| format!("{} is not valid", kept.display()))?;
    let now = of_folder(folder)?;
    let added = now.keys().filter(|name| !then.contains_key(*name)).map(|name| (name, "it was not there".to_owned()));
    let changed = then.iter().filter_map(|(name, file)| match now.get(name) {
        Some(now) => Some((name, file.difference(now)?)),
        None => Some((name, "it is not there any more".to_owned())),
    });
    match changed.chain(added).next() {
        Some((name, difference)) => bail!(
            "{}: {difference} since this run began, whose checkpoints do not have the frozen weights: put the file back, or set \
             model.hf_path to a folder that has it",
            folder.join(name).display()
        ),
        None => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn write(folder: &TempDir, name: &str, header: &str, data: &[u8]) {
        let header = header.as_bytes();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header, data].concat();
        fs::write(folder.path().join(name), bytes).unwrap();
    }

    #[test]
    fn other_weights_are_noticed() {
        const HEADER: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let [folder, assets] = [(); 2].map(|()| TempDir::new().unwrap());
        write(&folder, "model.safetensors", HEADER, &[1; 8]);
        assert!(!check(folder.path(), assets.path()).unwrap());
        keep(folder.path(), assets.path()).unwrap();
        assert!(check(folder.path(), assets.path()).unwrap());
        let differs = |difference: &str| {
            let error = check(folder.path(), assets.path()).unwrap_err().to_string();
            let file = folder.path().join("model.safetensors");
            assert!(error.starts_with(&format!("{}: {difference} since", file.display())), "{error}");
        };
        write(&folder, "model.safetensors", HEADER, &[1, 1, 1, 1, 1, 1, 1, 2]);
        differs("it has the same tensors with other values");
        write(&folder, "model.safetensors", &HEADER.replace(r#""a""#, r#""b""#), &[1; 8]);
        differs("its header lists other tensors");
        // The same tensors in a file with another name.
        fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        write(&folder, "other.safetensors", HEADER, &[1; 8]);
        fs::write(folder.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"other.safetensors"}}"#)
            .unwrap();
        differs("it is not there any more");
    }
}
