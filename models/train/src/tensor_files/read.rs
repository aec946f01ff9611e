//! Reads headers when files are opened, and the bytes of a tensor on request. Files are not
//! memory-mapped: a file that becomes shorter is an error, where a map would end the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::{INDEX, SINGLE, TensorFilesError};
use crate::files::{self, LFS_POINTER, is_lfs_pointer};

/// Maximum bytes of a header in the format.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes decoded at once: a multiple of every element size.
const CHUNK: usize = 1 << 20;

/// Tensors of one safetensors file, or of shards with an index. Writing to the files while this is
/// open changes the tensors.
#[derive(Debug)]
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
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Opens `folder/model.safetensors`, or the shards listed in
    /// `folder/model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`TensorFilesError::NoTensors`], [`Io`](TensorFilesError::Io),
    /// [`Json`](TensorFilesError::Json), [`MissingShard`](TensorFilesError::MissingShard).
    /// [`Broken`](TensorFilesError::Broken) for a file that is too short or too long, and for an
    /// index that contradicts its shards.
    pub fn open_folder(folder: impl AsRef<Path>) -> Result<Self, TensorFilesError> {
        let folder = folder.as_ref();
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        let files = if single.exists() {
            Self::open_file(&single)?
        } else if index.exists() {
            Self::open_shards(folder, &index)?
        } else {
            return Err(TensorFilesError::NoTensors { folder: folder.into() });
        };
        Ok(Self { path: folder.into(), ..files })
    }

    /// Opens one file.
    ///
    /// # Errors
    /// Errors of [`open_folder`](Self::open_folder) that apply to one file.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self, TensorFilesError> {
        let path = path.as_ref();
        let (file, tensors) = OpenFile::open(path, 0)?;
        Ok(Self { path: path.into(), files: vec![file], tensors })
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self, TensorFilesError> {
        let text =
            files::read_to_string(index).map_err(|source| TensorFilesError::Io { path: index.into(), source })?;
        let Index { weight_map } =
            serde_json::from_str(&text).map_err(|source| TensorFilesError::Json { path: index.into(), source })?;
        let contradiction = |reason| TensorFilesError::Broken { path: index.into(), reason };

        let shards: BTreeSet<&String> = weight_map.values().collect();
        let mut files = Vec::with_capacity(shards.len());
        let mut tensors = BTreeMap::new();
        for shard in shards {
            // An index may be untrusted: it may name only files in its folder.
            if !Path::new(shard).components().all(|part| matches!(part, Component::Normal(_))) || shard.is_empty() {
                return Err(contradiction(format!("{shard:?} is not the name of a file in this folder")));
            }
            let path = folder.join(shard);
            if let Some((name, _)) = weight_map.iter().find(|(_, file)| *file == shard).filter(|_| !path.exists()) {
                return Err(TensorFilesError::MissingShard { path, name: name.clone(), index: index.into() });
            }
            let (file, entries) = OpenFile::open(&path, files.len())?;
            files.push(file);
            for (name, entry) in entries {
                match weight_map.get(&name) {
                    Some(file) if file == shard => drop(tensors.insert(name, entry)),
                    Some(file) => return Err(contradiction(format!("{name} is in {file} and in {shard}"))),
                    None => return Err(contradiction(format!("{name} of {shard} is not in the index"))),
                }
            }
        }
        match weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
            Some((name, shard)) => Err(contradiction(format!("{name} is not in {shard}"))),
            None => Ok(Self { path: index.into(), files, tensors }),
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
    /// [`TensorFilesError::Missing`], [`TensorFilesError::Shape`].
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, TensorFilesError> {
        let Some(tensor) = self.get(name) else {
            return Err(TensorFilesError::Missing {
                name: name.into(),
                shape: shape.to_vec(),
                path: self.path.clone(),
            });
        };
        if tensor.shape() == shape {
            return Ok(tensor);
        }
        Err(TensorFilesError::Shape {
            name: name.into(),
            expected: shape.to_vec(),
            found: tensor.shape().to_vec(),
            path: tensor.file.path.clone(),
        })
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
    /// [`TensorFilesError::Io`]; [`TensorFilesError::Broken`] if the file has become shorter since
    /// it was opened.
    pub fn bytes(&self) -> Result<Vec<u8>, TensorFilesError> {
        let mut bytes = vec![0; self.entry.bytes];
        self.file.read(self.entry.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the elements as f32, row-major. F32, F16 and BF16 convert exactly.
    ///
    /// # Errors
    /// The errors of [`bytes`](Self::bytes); [`TensorFilesError::Dtype`].
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorFilesError> {
        self.decode(0..self.entry.bytes)
    }

    /// Reads rows of the first axis, as [`to_f32`](Self::to_f32) reads all elements.
    ///
    /// # Errors
    /// The errors of [`to_f32`](Self::to_f32).
    ///
    /// # Panics
    /// If the tensor is a scalar or has fewer rows.
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>, TensorFilesError> {
        assert!(rows.end <= self.entry.shape[0], "rows {rows:?} of {}: {:?}", self.name, self.entry.shape);
        let row = self.entry.bytes.checked_div(self.entry.shape[0]).unwrap_or(0);
        self.decode(rows.start * row..rows.end * row)
    }

    fn decode(&self, range: Range<usize>) -> Result<Vec<f32>, TensorFilesError> {
        let decode: fn(&[u8], &mut Vec<f32>) = match self.entry.dtype {
            Dtype::F32 => |bytes, values| decode(bytes, values, f32::from_le_bytes),
            Dtype::F16 => |bytes, values| decode(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => |bytes, values| decode(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            other => {
                return Err(TensorFilesError::Dtype {
                    name: self.name.into(),
                    dtype: format!("{other:?}"),
                    path: self.file.path.clone(),
                });
            }
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
    fn read(&self, start: u64, bytes: &mut [u8]) -> Result<(), TensorFilesError> {
        let Self { path, file, bytes: opened } = self;
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = || -> io::Result<()> {
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(bytes)
        };
        match read() {
            Err(source) if source.kind() == ErrorKind::UnexpectedEof => {
                let now = file.metadata().map_or(0, |metadata| metadata.len());
                let reason = format!("{now} bytes, {opened} when it was opened");
                Err(TensorFilesError::Broken { path: path.clone(), reason })
            }
            result => result.map_err(|source| TensorFilesError::Io { path: path.clone(), source }),
        }
    }

    /// Opens a file and reads its header. The tensors refer to it as file `number`.
    ///
    /// A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the
    /// data.
    fn open(path: &Path, number: usize) -> Result<(Self, BTreeMap<String, Entry>), TensorFilesError> {
        let io = |source| TensorFilesError::Io { path: path.into(), source };
        let broken = |reason| TensorFilesError::Broken { path: path.into(), reason };

        let mut file = files::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let mut length = [0; 8];
        if file_bytes < length.len() as u64 {
            return Err(broken(format!("{file_bytes} bytes are no safetensors file")));
        }
        file.read_exact(&mut length).map_err(io)?;
        // The first letters of a text file, read as a header length, exceed the size of any file.
        let mut begin = length.to_vec();
        file.by_ref().take(64).read_to_end(&mut begin).map_err(io)?;
        if is_lfs_pointer(&begin) {
            return Err(broken(LFS_POINTER.into()));
        }
        file.seek(SeekFrom::Start(8)).map_err(io)?;
        let length = u64::from_le_bytes(length);
        let data = length.checked_add(8).filter(|&data| data <= file_bytes && length <= MAX_HEADER);
        let Some(data) = data else {
            let begin = String::from_utf8_lossy(&begin[..8]);
            return Err(broken(format!(
                "it is cut, or no safetensors file: it has {file_bytes} bytes, and by its first 8 ({begin:?}) its header alone has {length}"
            )));
        };
        let mut header = Vec::new();
        file.by_ref().take(length).read_to_end(&mut header).map_err(io)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|source| TensorFilesError::Json { path: path.into(), source })?;
        if data.checked_add(metadata.data_len() as u64) != Some(file_bytes) {
            let asked = data as u128 + metadata.data_len() as u128;
            return Err(broken(format!("{file_bytes} bytes, its header asks for {asked}")));
        }
        let entry = |(name, info): (String, &TensorInfo)| {
            let (start, end) = info.data_offsets;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            (name, Entry { file: number, dtype, shape, start: data + start as u64, bytes: end - start })
        };
        let tensors = metadata.tensors().into_iter().map(entry).collect();
        Ok((Self { path: path.into(), file: Mutex::new(file), bytes: file_bytes }, tensors))
    }
}
