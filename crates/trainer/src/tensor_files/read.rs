//! Reads headers when files are opened, and the bytes of a tensor on request. Files are not
//! memory-mapped: a file that becomes shorter is an error, where a map would end the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::{INDEX, SINGLE, missing, other_dtype, other_shape};
use crate::files::{self, LFS_POINTER, is_lfs_pointer};

/// Maximum bytes of a header in the format.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes decoded at once: a multiple of every element size.
const CHUNK: usize = 1 << 20;

/// Tensors of one safetensors file, or of shards with an index. Writing to the files while this is
/// open changes the tensors.
#[derive(Debug, Default)]
pub struct TensorFiles {
    path: PathBuf,
    files: Vec<OpenFile>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: Mutex<File>,
    /// Size when it was opened.
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    /// Index of the file.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// First byte in the file.
    start: u64,
    bytes: usize,
}

#[derive(Deserialize)]
struct FileIndex {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Opens `folder/model.safetensors`, or the shards listed in
    /// `folder/model.safetensors.index.json`.
    ///
    /// # Errors
    /// A folder without tensors, a file that cannot be read or is no complete safetensors file, an
    /// index that contradicts its shards.
    pub fn open_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        let files = if single.exists() {
            Self::open_file(&single)?
        } else {
            ensure!(index.exists(), "{} holds neither {SINGLE} nor {INDEX}", folder.display());
            Self::open_shards(folder, &index)?
        };
        Ok(Self { path: folder.into(), ..files })
    }

    /// Opens one file.
    ///
    /// # Errors
    /// A file that cannot be read or is no complete safetensors file.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, tensors) = OpenFile::open(path, 0)?;
        Ok(Self { path: path.into(), files: vec![file], tensors })
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self> {
        let FileIndex { weight_map } = files::read_json(index)?;
        let shown = index.display();
        let mut all = Self::default();
        for shard in weight_map.values().collect::<BTreeSet<_>>() {
            // An index may be untrusted: it may name only files in its folder.
            let is_plain = Path::new(shard).components().all(|part| matches!(part, Component::Normal(_)));
            ensure!(is_plain && !shard.is_empty(), "{shown}: {shard:?} is not the name of a file in this folder");
            let path = folder.join(shard);
            if let Some((name, _)) = weight_map.iter().find(|(_, file)| *file == shard).filter(|_| !path.exists()) {
                bail!("{} is not there, in which {shown} has the tensor {name}", path.display());
            }
            let (file, entries) = OpenFile::open(&path, all.files.len())?;
            for name in entries.keys() {
                match weight_map.get(name) {
                    Some(file) => ensure!(file == shard, "{shown}: {name} is in {file} and in {shard}"),
                    None => bail!("{shown}: {name} of {shard} is not in the index"),
                }
            }
            all.files.push(file);
            all.tensors.extend(entries);
        }
        match weight_map.iter().find(|(name, _)| !all.tensors.contains_key(*name)) {
            Some((name, shard)) => bail!("{shown}: {name} is not in {shard}"),
            None => Ok(all),
        }
    }

    /// Path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Paths of the open files.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| &*file.path)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Total bytes of all tensors.
    pub fn num_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.bytes as u64).sum()
    }

    /// Tensor `name`, if it exists.
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        Some(StoredTensor { name, entry, file: &self.files[entry.file] })
    }

    /// Tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// No such tensor, or another shape.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        let tensor = self.get(name).ok_or_else(|| missing(&self.path, name, shape))?;
        if tensor.shape() == shape { Ok(tensor) } else { Err(other_shape(tensor.path(), name, tensor.shape(), shape)) }
    }
}

/// Tensor in a file. Only its header has been read.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    name: &'a str,
    entry: &'a Entry,
    file: &'a OpenFile,
}

impl<'a> StoredTensor<'a> {
    /// Name in the file.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Dtype of the elements in the file.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Shape, slowest dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry.shape
    }

    /// File that holds it.
    pub fn path(&self) -> &'a Path {
        &self.file.path
    }

    /// Size in the file, in bytes.
    pub fn num_bytes(&self) -> u64 {
        self.entry.bytes as u64
    }

    /// Reads the elements as stored: row-major, little-endian.
    ///
    /// # Errors
    /// A file that cannot be read, or that has become shorter since it was opened.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.entry.bytes];
        self.file.read(self.entry.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the elements as f32, row-major. F32, F16 and BF16 convert exactly.
    ///
    /// # Errors
    /// The errors of [`bytes`](Self::bytes); another dtype.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.decode(0..self.entry.bytes)
    }

    /// Reads rows of the first axis, as [`to_f32`](Self::to_f32) reads all elements.
    ///
    /// # Errors
    /// The errors of [`to_f32`](Self::to_f32).
    ///
    /// # Panics
    /// If the tensor is a scalar or has fewer rows.
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        assert!(rows.end <= self.entry.shape[0], "rows {rows:?} of {}: {:?}", self.name, self.entry.shape);
        let row = self.entry.bytes.checked_div(self.entry.shape[0]).unwrap_or(0);
        self.decode(rows.start * row..rows.end * row)
    }

    fn decode(&self, range: Range<usize>) -> Result<Vec<f32>> {
        let decode: fn(&[u8], &mut Vec<f32>) = match self.entry.dtype {
            Dtype::F32 => |bytes, values| decode(bytes, values, f32::from_le_bytes),
            Dtype::F16 => |bytes, values| decode(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => |bytes, values| decode(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => return Err(other_dtype(*self)),
        };
        let mut values = Vec::with_capacity(range.len() / (self.entry.dtype.bitsize() / 8));
        let mut buffer = vec![0; CHUNK.min(range.len())];
        for begin in range.clone().step_by(CHUNK) {
            let chunk = &mut buffer[..CHUNK.min(range.end - begin)];
            self.file.read(self.entry.start + begin as u64, chunk)?;
            decode(chunk, &mut values);
        }
        Ok(values)
    }
}

fn decode<const N: usize>(bytes: &[u8], values: &mut Vec<f32>, convert: impl Fn([u8; N]) -> f32) {
    values.extend(bytes.as_chunks::<N>().0.iter().map(|&chunk| convert(chunk)));
}

impl OpenFile {
    /// Fills `bytes` from position `start`.
    fn read(&self, start: u64, bytes: &mut [u8]) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = || -> io::Result<()> {
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(bytes)
        };
        let path = self.path.display();
        match read() {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                let now = file.metadata().map_or(0, |metadata| metadata.len());
                bail!("{path}: {now} bytes, {} when it was opened", self.bytes)
            }
            result => result.with_context(|| format!("cannot read {path}")),
        }
    }

    /// Opens a file and reads its header. The tensors refer to it as file `number`.
    ///
    /// A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the
    /// data.
    fn open(path: &Path, number: usize) -> Result<(Self, BTreeMap<String, Entry>)> {
        let read = || format!("cannot read {}", path.display());
        let broken = |reason: String| -> Error { anyhow!("{}: {reason}", path.display()) };
        let mut file = files::open(path).with_context(read)?;
        let bytes = file.metadata().with_context(read)?.len();
        let mut begin = vec![];
        file.by_ref().take(64).read_to_end(&mut begin).with_context(read)?;
        let Some(length) = begin.first_chunk() else {
            return Err(broken(format!("{bytes} bytes are no safetensors file")));
        };
        // The first letters of a text file, read as a header length, exceed the size of any file.
        ensure!(!is_lfs_pointer(&begin), broken(LFS_POINTER.into()));
        let length_of_header = u64::from_le_bytes(*length);
        let data = length_of_header.checked_add(8).filter(|&data| data <= bytes && length_of_header <= MAX_HEADER);
        let Some(data) = data else {
            return Err(broken(format!(
                "it is cut, or no safetensors file: it has {bytes} bytes, and by its first 8 ({:?}) its header alone has {length_of_header}",
                String::from_utf8_lossy(length)
            )));
        };
        file.seek(SeekFrom::Start(8)).with_context(read)?;
        let mut header = vec![];
        file.by_ref().take(length_of_header).read_to_end(&mut header).with_context(read)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).with_context(|| format!("{} is not valid", path.display()))?;
        let wanted = u128::from(data) + metadata.data_len() as u128;
        ensure!(wanted == u128::from(bytes), broken(format!("{bytes} bytes, its header asks for {wanted}")));
        let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
            let (start, end) = info.data_offsets;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            (name, Entry { file: number, dtype, shape, start: data + start as u64, bytes: end - start })
        };
        let tensors = metadata.tensors().into_iter().map(entry).collect();
        Ok((Self { path: path.into(), file: Mutex::new(file), bytes }, tensors))
    }
}
