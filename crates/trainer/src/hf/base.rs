//! Identity of the base weights of a run that does not save them. [`keep`] records the files of a
//! Hugging Face folder, and [`check`] compares them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::tensor_files::TensorFiles;
use crate::{atomic, digest, files};

/// Name of the record among the assets of a run.
pub(super) const BASE: &str = "base.json";

/// Larger files are sampled, so that a run need not read a whole model twice to begin.
const MAX_HASHED: u64 = 64 << 20;

/// Digests of the tensor files of a folder, by name: SHA-256 of a whole file; above 64 MiB, of its
/// length and samples at even distances from its beginning.
pub(crate) fn of_folder(folder: &Path) -> Result<BTreeMap<String, String>> {
    let of_file = |path: &Path| {
        let name = path.strip_prefix(folder).unwrap_or(path).display().to_string();
        let digest = digest::of_file_or_samples(path, MAX_HASHED);
        Ok((name, digest.with_context(|| format!("cannot read {}", path.display()))?))
    };
    TensorFiles::open_folder(folder)?.paths().map(of_file).collect()
}

/// Records the tensor files of `folder` in the folder `assets`.
///
/// # Errors
/// Files that cannot be read or written.
pub(crate) fn keep(folder: &Path, assets: &Path) -> Result<()> {
    let path = assets.join(BASE);
    atomic::replace_json(&path, &of_folder(folder)?).with_context(|| format!("cannot write {}", path.display()))
}

/// Compares the tensor files of `folder` with the record that [`keep`] made.
///
/// # Errors
/// The first file that differs; files that cannot be read.
pub(crate) fn check(folder: &Path, assets: &Path) -> Result<()> {
    let then: BTreeMap<String, String> = files::read_json(&assets.join(BASE))?;
    let now = of_folder(folder)?;
    for name in then.keys().chain(now.keys()) {
        let difference = match (then.get(name), now.get(name)) {
            (Some(then), Some(now)) if then == now => continue,
            (Some(_), Some(_)) => "it has other contents",
            (Some(_), None) => "it is not there any more",
            (None, _) => "it was not there",
        };
        bail!(
            "{}: {difference} since this run began, whose checkpoints do not have the frozen weights: put the file back, or set model.hf_path \
             to a folder that has it",
            folder.join(name).display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::Dtype;
    use tempfile::TempDir;

    use super::*;
    use crate::tensor_files::{NewTensor, f32_bytes, write_file};

    #[test]
    fn other_weights_are_noticed() {
        let [folder, assets] = [(); 2].map(|()| TempDir::new().unwrap());
        let (path, other) = (folder.path().join("model.safetensors"), folder.path().join("other.safetensors"));
        let write = |name: &str, values: &'static [f32]| {
            let bytes = Box::new(move || Ok(f32_bytes(values)));
            let tensor = NewTensor { name: name.into(), dtype: Dtype::F32, shape: vec![values.len()], bytes };
            write_file(&path, &[tensor], None).unwrap();
        };
        write("a", &[1.0, 2.0]);
        assert!(check(folder.path(), assets.path()).unwrap_err().to_string().contains(BASE));
        keep(folder.path(), assets.path()).unwrap();
        check(folder.path(), assets.path()).unwrap();
        let refused = |path: &Path, difference: &str| {
            let error = check(folder.path(), assets.path()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}: {difference} since this run began", path.display())), "{error}");
        };
        write("a", &[1.0, 3.0]);
        refused(&path, "it has other contents");
        write("b", &[1.0, 2.0]);
        refused(&path, "it has other contents");
        write("a", &[1.0; 100]);
        refused(&path, "it has other contents");
        fs::rename(&path, &other).unwrap();
        let index = r#"{"weight_map":{"a":"other.safetensors"}}"#;
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        refused(&path, "it is not there any more");
    }
}
