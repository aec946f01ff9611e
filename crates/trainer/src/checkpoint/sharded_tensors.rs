//! Tensors of a checkpoint: whole in one file, or as rows in the files of the ranks, located by an
//! index.
//!
//! ```text
//! index.json                                parts of each tensor: rows, columns, and their file
//! model-rank-00000-of-00004.safetensors     tensors written by rank 0
//! ```
//! The rows of a part are one range of bytes in its file, so any number of ranks can read the rows
//! it needs.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use float8_shard::Place;
use serde::{Deserialize, Serialize};

use super::cannot;
use crate::tensor_files::{TensorFiles, missing, other_shape, unexpected};
use crate::{atomic, files};

pub(super) const INDEX: &str = "index.json";

/// Index of the tensors written by the ranks of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    /// Number of ranks that wrote.
    ranks: usize,
    tensors: Parts,
}

/// Parts of tensors, by name.
pub(super) type Parts = BTreeMap<String, Indexed>;

/// Parts of a tensor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Indexed {
    /// Shape of the whole tensor.
    shape: Vec<usize>,
    parts: Vec<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    /// Row range of the whole tensor: first row, and one past the last.
    rows: [usize; 2],
    /// Column range of a matrix; `None` for all columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cols: Option<[usize; 2]>,
    file: String,
}

impl Indexed {
    /// This rank's elements of a tensor, in one file.
    pub(super) fn new(place: &Place, file: &str) -> Self {
        let Range { start, end } = place.own_rows();
        let part = Part { rows: [start, end], cols: place.cols, file: file.into() };
        Self { shape: place.shape.clone(), parts: vec![part] }
    }
}

impl Index {
    /// Joins the parts that each rank wrote.
    pub(super) fn new(ranks: Vec<Parts>) -> Self {
        let mut index = Self { ranks: ranks.len(), tensors: Parts::new() };
        for (name, Indexed { shape, parts }) in ranks.into_iter().flatten() {
            index.tensors.entry(name).or_insert_with(|| Indexed { shape, parts: vec![] }).parts.extend(parts);
        }
        index
    }

    pub(super) fn write(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(INDEX);
        atomic::replace_json(&path, self).with_context(cannot("write", &path))?;
        Ok(path)
    }
}

/// Tensors of one kind in a checkpoint.
#[derive(Debug)]
pub(crate) struct SavedTensors {
    /// The index, or the file of a single process.
    path: PathBuf,
    tensors: Parts,
    files: BTreeMap<String, TensorFiles>,
    /// Names of tensors that were read.
    read: HashSet<String>,
}

impl SavedTensors {
    /// Opens the tensors in `file` or, for a run of several ranks, in the ranks' files of that
    /// kind.
    pub(super) fn open(folder: &Path, file: &str) -> Result<Self> {
        let (mut path, mut files) = (folder.join(INDEX), BTreeMap::new());
        let index: Index = if path.exists() {
            files::read_json(&path)?
        } else {
            path = folder.join(file);
            let whole = TensorFiles::open_file(&path)?;
            let part = |name: &str| {
                Some((name.to_string(), Indexed::new(&Place::whole(name, whole.get(name)?.shape()), file)))
            };
            let index = Index::new(vec![whole.names().filter_map(part).collect()]);
            files.insert(file.to_string(), whole);
            index
        };
        // The index has tensors of all kinds of files.
        let kind = file.strip_suffix(".safetensors").unwrap_or(file);
        let is_of_kind = |part: &Part| {
            part.file == file || part.file.strip_prefix(kind).is_some_and(|rest| rest.starts_with("-rank-"))
        };
        let mut tensors = index.tensors;
        tensors.retain(|_, tensor| tensor.parts.iter().any(is_of_kind));
        for part in tensors.values().flat_map(|tensor| &tensor.parts) {
            if !files.contains_key(&part.file) {
                files.insert(part.file.clone(), TensorFiles::open_file(folder.join(&part.file))?);
            }
        }
        Ok(Self { path, tensors, files, read: HashSet::new() })
    }

    /// Bytes of the tensors in their files.
    pub(super) fn num_bytes(&self) -> u64 {
        self.files.values().map(TensorFiles::num_bytes).sum()
    }

    /// Returns an error if there are tensors that were not read.
    pub(crate) fn all_read(&self) -> Result<()> {
        let names = self.tensors.keys().map(String::as_str);
        let others: Vec<_> = names.filter(|name| !self.read.contains(*name)).collect();
        if others.is_empty() { Ok(()) } else { Err(unexpected(&self.path, &others)) }
    }

    /// Elements of a tensor in f32. It must have the shape of the place.
    pub(crate) fn values(&mut self, place: &Place) -> Result<Vec<f32>> {
        let (Place { name, shape, cols, .. }, rows) = (place, place.own_rows());
        let found = self.tensors.get_mut(name);
        let Indexed { shape: found, parts } = found.ok_or_else(|| missing(&self.path, name, shape))?;
        if found != shape {
            return Err(other_shape(&self.path, name, found, shape));
        }
        let path = self.path.display();
        let all = [0, shape[1..].iter().product()];
        let cols = cols.unwrap_or(all);
        let width = cols[1] - cols[0];
        let mut values = vec![0.0; rows.len() * width];
        let mut next_col = cols[0];
        // In the order of columns, then of rows; a gap between parts is reported as missing.
        parts.sort_by_key(|part| (part.cols, part.rows));
        for parts in parts.chunk_by(|a, b| a.cols == b.cols) {
            let [left, right] = parts[0].cols.unwrap_or(all);
            let of_part = next_col.max(left)..cols[1].min(right);
            if left > next_col || of_part.is_empty() {
                continue;
            }
            let mut next = rows.start;
            for Part { rows: [begin, end], cols: stored, file } in parts {
                let wanted = next.max(*begin)..rows.end.min(*end);
                if *begin > next || wanted.is_empty() {
                    continue;
                }
                let others = stored.map_or(shape[1..].to_vec(), |_| vec![right - left]);
                let tensor = self.files[file].expect(name, &[&[*end - *begin], &others[..]].concat())?;
                let found = tensor.rows_f32(wanted.start - *begin..wanted.end - *begin)?;
                for (row, found) in wanted.clone().zip(found.chunks_exact(right - left)) {
                    let at = (row - rows.start) * width + of_part.start - cols[0];
                    values[at..at + of_part.len()].copy_from_slice(&found[of_part.start - left..of_part.end - left]);
                }
                next = wanted.end;
            }
            ensure!(next >= rows.end, "{path}: rows {next}.. of {name} are in no file");
            next_col = of_part.end;
        }
        ensure!(next_col >= cols[1], "{path}: columns {next_col}.. of {name} are in no file");
        self.read.insert(name.into());
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::tensor_files::{NewTensor, f32_bytes, write_file};

    fn place(name: &str, shape: &[usize], rows: Range<usize>) -> Place {
        Place { rows: Some([rows.start, rows.end]), ..Place::whole(name, shape) }
    }

    /// Seven rows of two elements, in parts of 3, 3 and 1 from three ranks, and a bias written by
    /// the first rank.
    fn saved(folder: &Path, left_out: usize) -> SavedTensors {
        let mut ranks = vec![];
        for (rank, rows) in [0..3, 3..6, 6..7].into_iter().enumerate().filter(|(rank, _)| *rank != left_out) {
            let file = format!("model-rank-{rank}.safetensors");
            let mut tensors = vec![("w", vec![rows.len(), 2], (2 * rows.start..2 * rows.end).collect::<Vec<_>>())];
            let mut parts = Parts::from([("w".to_string(), Indexed::new(&place("w", &[7, 2], rows), &file))]);
            if rank == 0 {
                tensors.push(("bias", vec![2], vec![8, 9]));
                parts.insert("bias".into(), Indexed::new(&Place::whole("bias", [2]), &file));
            }
            let new = |(name, shape, values): (&str, Vec<usize>, Vec<usize>)| NewTensor {
                name: name.into(),
                dtype: Dtype::F32,
                shape,
                bytes: Box::new(move || Ok(f32_bytes(&values.iter().map(|v| *v as f32).collect::<Vec<_>>()))),
            };
            write_file(&folder.join(file), &tensors.into_iter().map(new).collect::<Vec<_>>(), None).unwrap();
            ranks.push(parts);
        }
        let moment = Indexed::new(&Place::whole("w.moment_1", [7, 2]), "optimizer-rank-0");
        ranks.push(Parts::from([("w.moment_1".to_string(), moment)]));
        Index::new(ranks).write(folder).unwrap();
        SavedTensors::open(folder, "model.safetensors").unwrap()
    }

    #[test]
    fn any_rows_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut saved = saved(folder.path(), 9);
        for begin in 0..=7 {
            for end in begin..=7 {
                let expected: Vec<f32> = (2 * begin..2 * end).map(|v| v as f32).collect();
                assert_eq!(saved.values(&place("w", &[7, 2], begin..end)).unwrap(), expected);
            }
        }
        // The moments are in other files, which are not open.
        let error = saved.all_read().unwrap_err().to_string();
        assert!(error.contains("bias") && !error.contains("moment"), "{error}");
        assert_eq!(saved.values(&Place::whole("bias", [2])).unwrap(), [8.0, 9.0]);
        saved.all_read().unwrap();
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut saved = saved(folder.path(), 1);
        assert_eq!(saved.values(&place("w", &[7, 2], 6..7)).unwrap(), [12.0, 13.0]);
        for (name, shape, rows, expected) in [
            ("w", &[7, 2][..], 0..7, "rows 3.. of w are in no file"),
            ("w", &[8, 2], 0..8, "w has shape [7, 2], the model needs [8, 2]"),
            ("v", &[7, 2], 0..7, "lacks the tensor v [7, 2]"),
        ] {
            let error = saved.values(&place(name, shape, rows)).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }

    /// Parts of four ranks, 2 × 2: two ranges of rows, and two of columns.
    #[test]
    fn parts_of_columns_are_joined() {
        let folder = tempfile::tempdir().unwrap();
        let value = |row: usize, col: usize| (10 * row + col) as f32;
        let mut ranks = vec![];
        for (rank, (rows, cols)) in
            [(0..3, [0, 4]), (0..3, [4, 8]), (3..5, [0, 4]), (3..5, [4, 8])].into_iter().enumerate()
        {
            let file = format!("model-rank-{rank}.safetensors");
            let of = rows.clone().flat_map(|row| (cols[0]..cols[1]).map(move |col| value(row, col)));
            let values: Vec<_> = of.collect();
            let new = NewTensor {
                name: "w".into(),
                dtype: Dtype::F32,
                shape: vec![rows.len(), 4],
                bytes: Box::new(move || Ok(f32_bytes(&values))),
            };
            write_file(&folder.path().join(&file), &[new], None).unwrap();
            let place = Place { cols: Some(cols), ..place("w", &[5, 8], rows) };
            ranks.push(Parts::from([("w".to_string(), Indexed::new(&place, &file))]));
        }
        let write = |ranks| drop(Index::new(ranks).write(folder.path()).unwrap());
        let last = ranks.pop().unwrap();
        write(vec![last]);
        let open = || SavedTensors::open(folder.path(), "model.safetensors").unwrap();
        let error = open().values(&place("w", &[5, 8], 3..5)).unwrap_err().to_string();
        assert!(error.ends_with("columns 0.. of w are in no file"), "{error}");
        let last = Place { cols: Some([4, 8]), ..place("w", &[5, 8], 3..5) };
        ranks.push(Parts::from([("w".to_string(), Indexed::new(&last, "model-rank-3.safetensors"))]));
        write(ranks);
        for (rows, cols) in [(0..5, [0, 8]), (1..4, [3, 5]), (4..5, [4, 8]), (0..3, [1, 2])] {
            let expected: Vec<_> =
                rows.clone().flat_map(|row| (cols[0]..cols[1]).map(move |col| value(row, col))).collect();
            let place = Place { cols: Some(cols), ..place("w", &[5, 8], rows) };
            assert_eq!(open().values(&place).unwrap(), expected);
        }
    }
}
