//! Tensors of a checkpoint: whole in one file, or as rows in the files of the ranks, located by an
//! index.
//!
//! ```text
//! index.json                                parts of each tensor: rows of its first axis, and their file
//! model-rank-00000-of-00004.safetensors     tensors written by rank 0
//! ```
//! The rows of a part are one range of bytes in its file, so any number of ranks can read the rows
//! it needs.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::tensor_files::{TensorFiles, TensorFilesError};
use crate::{atomic, files};

pub(super) const INDEX: &str = "index.json";

/// Index of the tensors written by the ranks of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    /// Number of ranks that wrote.
    pub(super) ranks: usize,
    tensors: BTreeMap<String, Indexed>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Indexed {
    /// Shape of the whole tensor.
    shape: Vec<usize>,
    parts: Vec<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    /// Row range of the whole tensor: first row, and one past the last.
    rows: [usize; 2],
    file: String,
}

/// Rows of a tensor written by one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rows {
    /// Name of the tensor.
    pub(super) name: String,
    /// Shape of the whole tensor.
    pub(super) shape: Vec<usize>,
    /// The rows.
    pub(super) rows: Range<usize>,
    /// Name of the file.
    pub(super) file: String,
}

impl Index {
    pub(super) fn new(ranks: usize, parts: impl IntoIterator<Item = Rows>) -> Self {
        let mut tensors: BTreeMap<String, Indexed> = BTreeMap::new();
        for Rows { name, shape, rows, file } in parts {
            let indexed = tensors.entry(name).or_insert_with(|| Indexed { shape, parts: vec![] });
            indexed.parts.push(Part { rows: [rows.start, rows.end], file });
        }
        Self { ranks, tensors }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<PathBuf, CheckpointError> {
        let path = folder.join(INDEX);
        match atomic::replace_json(&path, self) {
            Ok(()) => Ok(path),
            Err(source) => Err(CheckpointError::Io { doing: "write", path, source }),
        }
    }
}

/// The tensors of a checkpoint.
#[derive(Debug)]
pub(super) enum SavedTensors {
    /// Tensors of a single process.
    Whole(TensorFiles),
    /// Tensors of several ranks.
    Parts {
        /// Path of the index.
        path: PathBuf,
        index: Index,
        files: BTreeMap<String, TensorFiles>,
    },
}

impl SavedTensors {
    /// Opens the tensors in `file` or, for a run of several ranks, in the ranks' files of that
    /// kind.
    pub(super) fn open(folder: &Path, file: &str) -> Result<Self, CheckpointError> {
        let path = folder.join(INDEX);
        if !path.exists() {
            return Ok(Self::Whole(TensorFiles::open_file(folder.join(file))?));
        }
        let text = files::read_to_string(&path).map_err(|source| CheckpointError::Io {
            doing: "read",
            path: path.clone(),
            source,
        })?;
        let mut index: Index =
            serde_json::from_str(&text).map_err(|source| CheckpointError::Json { path: path.clone(), source })?;
        // The index has tensors of all kinds of files.
        let kind = file.strip_suffix(".safetensors").unwrap_or(file);
        let is_of_kind = |part: &Part| part.file.strip_prefix(kind).is_some_and(|rest| rest.starts_with("-rank-"));
        index.tensors.retain(|_, tensor| tensor.parts.iter().any(is_of_kind));
        let mut files = BTreeMap::new();
        for part in index.tensors.values().flat_map(|tensor| &tensor.parts) {
            if !files.contains_key(&part.file) {
                files.insert(part.file.clone(), TensorFiles::open_file(folder.join(&part.file))?);
            }
        }
        Ok(Self::Parts { path, index, files })
    }

    /// Bytes of the tensors in their files.
    pub(super) fn num_bytes(&self) -> u64 {
        match self {
            Self::Whole(file) => file.num_bytes(),
            Self::Parts { files, .. } => files.values().map(TensorFiles::num_bytes).sum(),
        }
    }

    /// Returns an error if there are tensors with other names.
    pub(super) fn only(&self, known: &HashSet<String>) -> Result<(), CheckpointError> {
        const SHOWN: usize = 5;
        let (path, names): (&Path, Vec<&str>) = match self {
            Self::Whole(file) => (file.path(), file.names().collect()),
            Self::Parts { path, index, .. } => (path, index.tensors.keys().map(String::as_str).collect()),
        };
        let mut names: Vec<_> = names.into_iter().filter(|name| !known.contains(*name)).map(String::from).collect();
        if names.is_empty() {
            return Ok(());
        }
        names.sort();
        let more = names.len().saturating_sub(SHOWN);
        names.truncate(SHOWN);
        names.extend((more > 0).then(|| format!("and {more} more")));
        Err(TensorFilesError::Unexpected { names, path: path.into() }.into())
    }

    /// Rows of the tensor `name` in f32. The tensor must have this shape.
    pub(super) fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let (path, index, files) = match self {
            Self::Whole(file) => return Ok(file.expect(name, shape)?.rows_f32(rows)?),
            Self::Parts { path, index, files } => (path, index, files),
        };
        let Some(Indexed { shape: found, parts }) = index.tensors.get(name) else {
            let (name, shape) = (name.into(), shape.to_vec());
            return Err(TensorFilesError::Missing { name, shape, path: path.clone() }.into());
        };
        if found != shape {
            let (name, expected, found) = (name.into(), shape.to_vec(), found.clone());
            return Err(TensorFilesError::Shape { name, expected, found, path: path.clone() }.into());
        }
        let mut values = Vec::with_capacity(rows.len() * shape[1..].iter().product::<usize>());
        let mut next = rows.start;
        // In the order of rows; a gap between parts is reported as missing rows.
        let mut parts: Vec<_> = parts.iter().collect();
        parts.sort_by_key(|part| part.rows);
        for Part { rows: [begin, end], file } in parts {
            let wanted = next.max(*begin)..rows.end.min(*end);
            if *begin > next || wanted.is_empty() {
                continue;
            }
            let stored = [&[end - begin], &shape[1..]].concat();
            let tensor = files[file].expect(name, &stored)?;
            values.extend(tensor.rows_f32(wanted.start - begin..wanted.end - begin)?);
            next = wanted.end;
        }
        if next < rows.end {
            let reason = format!("rows {next}.. of {name} are in no file");
            return Err(TensorFilesError::Broken { path: path.clone(), reason }.into());
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::tensor_files::{NewTensor, f32_bytes, write_file};

    /// Seven rows of two elements, in parts of 3, 3 and 1 from three ranks, and a bias written by
    /// the first rank.
    fn saved(folder: &Path, left_out: usize) -> SavedTensors {
        let mut parts = vec![];
        for (rank, rows) in [0..3, 3..6, 6..7].into_iter().enumerate().filter(|(rank, _)| *rank != left_out) {
            let file = format!("model-rank-{rank}.safetensors");
            let mut tensors = vec![("w", vec![rows.len(), 2], (2 * rows.start..2 * rows.end).collect::<Vec<_>>())];
            parts.push(Rows { name: "w".into(), shape: vec![7, 2], rows, file: file.clone() });
            if rank == 0 {
                tensors.push(("bias", vec![2], vec![8, 9]));
                parts.push(Rows { name: "bias".into(), shape: vec![2], rows: 0..2, file: file.clone() });
            }
            let new = |(name, shape, values): (&str, Vec<usize>, Vec<usize>)| NewTensor::<TensorFilesError> {
                name: name.into(),
                dtype: Dtype::F32,
                shape,
                bytes: Box::new(move || Ok(f32_bytes(&values.iter().map(|v| *v as f32).collect::<Vec<_>>()))),
            };
            write_file(&folder.join(file), &tensors.into_iter().map(new).collect::<Vec<_>>(), None).unwrap();
        }
        let moment =
            |rows| Rows { name: "w.moment_1".into(), shape: vec![7, 2], rows, file: "optimizer-rank-0".into() };
        parts.push(moment(0..7));
        Index::new(3, parts).write(folder).unwrap();
        SavedTensors::open(folder, "model.safetensors").unwrap()
    }

    #[test]
    fn any_rows_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let saved = saved(folder.path(), 9);
        for begin in 0..=7 {
            for end in begin..=7 {
                let expected: Vec<f32> = (2 * begin..2 * end).map(|v| v as f32).collect();
                assert_eq!(saved.rows("w", &[7, 2], begin..end).unwrap(), expected);
            }
        }
        assert_eq!(saved.rows("bias", &[2], 0..2).unwrap(), [8.0, 9.0]);
        // The moments are in other files, which are not open.
        saved.only(&["w", "bias"].map(String::from).into()).unwrap();
        let error = saved.only(&["w".to_string()].into()).unwrap_err().to_string();
        assert!(error.contains("bias") && !error.contains("moment"), "{error}");
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let saved = saved(folder.path(), 1);
        let error = |name, shape: &[usize], rows| saved.rows(name, shape, rows).unwrap_err().to_string();
        assert_eq!(saved.rows("w", &[7, 2], 6..7).unwrap(), [12.0, 13.0]);
        assert!(error("w", &[7, 2], 0..7).ends_with("rows 3.. of w are in no file"));
        assert!(error("w", &[8, 2], 0..8).contains("w has shape [7, 2], the model needs [8, 2]"));
        assert!(error("v", &[7, 2], 0..7).contains("lacks the tensor v [7, 2]"));
    }
}
