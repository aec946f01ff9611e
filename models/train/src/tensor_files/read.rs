//! Reading: headers when files are opened, each tensor's bytes from the mapped file when they are asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::{INDEX, SINGLE, TensorFilesError};

/// The tensors of one safetensors file, or of shards with an index. The files are mapped, not read: nobody may change them
/// while this lives.
#[derive(Debug)]
pub struct TensorFiles {
    path: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
}

#[derive(Debug)]
struct Entry {
    /// Which of the files.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// In the file.
    bytes: Range<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Opens `folder/model.safetensors`, or the shards that `folder/model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`TensorFilesError::NoTensors`], [`Io`](TensorFilesError::Io), [`Json`](TensorFilesError::Json);
    /// [`Broken`](TensorFilesError::Broken) for a file that is cut or too long, and for an index that contradicts its shards.
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
    /// Those of [`open_folder`](Self::open_folder) that one file can have.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self, TensorFilesError> {
        let path = path.as_ref();
        let (file, tensors) = MappedFile::open(path, 0)?;
        Ok(Self { path: path.into(), files: vec![file], tensors })
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self, TensorFilesError> {
        let text = fs::read_to_string(index).map_err(|source| TensorFilesError::Io { path: index.into(), source })?;
        let Index { weight_map } =
            serde_json::from_str(&text).map_err(|source| TensorFilesError::Json { path: index.into(), source })?;
        let contradiction = |reason| TensorFilesError::Broken { path: index.into(), reason };

        let shards: BTreeSet<&String> = weight_map.values().collect();
        let mut files = Vec::with_capacity(shards.len());
        let mut tensors = BTreeMap::new();
        for shard in shards {
            let (file, entries) = MappedFile::open(&folder.join(shard), files.len())?;
            files.push(file);
            for (name, entry) in entries {
                // The index decides which of two copies counts; a tensor that it does not know is reported.
                match weight_map.get(&name) {
                    Some(file) if file == shard => drop(tensors.insert(name, entry)),
                    Some(_) => {}
                    None => return Err(contradiction(format!("{name} of {shard} is not in the index"))),
                }
            }
        }
        match weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
            Some((name, shard)) => Err(contradiction(format!("{name} is not in {shard}"))),
            None => Ok(Self { path: index.into(), files, tensors }),
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, if it is there.
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        Some(StoredTensor { name, entry, file: &self.files[entry.file] })
    }

    /// The tensor `name`, which should have this shape.
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

/// A tensor in a file, of which only the header was read.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    name: &'a str,
    entry: &'a Entry,
    file: &'a MappedFile,
}

impl<'a> StoredTensor<'a> {
    /// Of the elements in the file.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Slowest dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry.shape
    }

    /// The elements as the file has them: row-major, little-endian. Nothing is copied; the system reads what is touched.
    ///
    /// # Errors
    /// [`TensorFilesError::Io`]; [`TensorFilesError::Broken`] if the file is shorter than when it was opened.
    pub fn bytes(&self) -> Result<&'a [u8], TensorFilesError> {
        self.file.check_length()?;
        Ok(&self.file.map[self.entry.bytes.clone()])
    }

    /// The elements in f32, row-major: F32, F16 and BF16 exactly.
    ///
    /// # Errors
    /// Those of [`bytes`](Self::bytes); [`TensorFilesError::Dtype`].
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorFilesError> {
        let decode: fn(&[u8]) -> Vec<f32> = match self.entry.dtype {
            Dtype::F32 => |bytes| decode(bytes, f32::from_le_bytes),
            Dtype::F16 => |bytes| decode(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => |bytes| decode(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            other => {
                return Err(TensorFilesError::Dtype {
                    name: self.name.into(),
                    dtype: format!("{other:?}"),
                    path: self.file.path.clone(),
                });
            }
        };
        self.bytes().map(decode)
    }
}

fn decode<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| convert(chunk)).collect()
}

impl MappedFile {
    /// Maps the file and reads its header, whose tensors then lie in file number `number`.
    ///
    /// A safetensors file is an 8-byte little-endian length, that many bytes of JSON, and the data.
    fn open(path: &Path, number: usize) -> Result<(Self, BTreeMap<String, Entry>), TensorFilesError> {
        let io = |source| TensorFilesError::Io { path: path.into(), source };
        let broken = |reason| TensorFilesError::Broken { path: path.into(), reason };

        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and only seen as bytes, for which every value is valid. The header is taken out of it
        // once, and no code relies on reading the same data twice. That nobody changes the file is asked of the caller.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let Some((length, rest)) = map.split_first_chunk() else {
            return Err(broken(format!("{} bytes are no safetensors file", map.len())));
        };
        let length = u64::from_le_bytes(*length);
        let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
        let Some(header) = header else {
            return Err(broken(format!("a header of {length} bytes in a file of {}", map.len())));
        };
        let metadata: Metadata =
            serde_json::from_slice(header).map_err(|source| TensorFilesError::Json { path: path.into(), source })?;
        let data = map.len() - rest.len() + header.len();
        let end = data.checked_add(metadata.data_len());
        if end != Some(map.len()) {
            let asked = end.map_or("more than there is memory".into(), |end| end.to_string());
            return Err(broken(format!("{} bytes, its header asks for {asked}", map.len())));
        }
        let entry = |(name, info): (String, &TensorInfo)| {
            let (start, end) = info.data_offsets;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            (name, Entry { file: number, dtype, shape, bytes: data + start..data + end })
        };
        let tensors = metadata.tensors().into_iter().map(entry).collect();
        Ok((Self { path: path.into(), file, map }, tensors))
    }

    /// Reading a page that the file no longer has would end the process.
    fn check_length(&self) -> Result<(), TensorFilesError> {
        let path = &self.path;
        let metadata = self.file.metadata().map_err(|source| TensorFilesError::Io { path: path.clone(), source })?;
        if metadata.len() >= self.map.len() as u64 {
            return Ok(());
        }
        let reason = format!("{} bytes, {} when it was opened", metadata.len(), self.map.len());
        Err(TensorFilesError::Broken { path: path.clone(), reason })
    }
}
