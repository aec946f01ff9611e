//! A safetensors checkpoint, one file or shards with an index, read one tensor at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn::tensor::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use crate::Error;

/// Where each tensor of a checkpoint lies.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    dir: PathBuf,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    path: PathBuf,
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

impl Checkpoint {
    /// Reads the headers of `dir/model.safetensors`, or of the shards that `dir/model.safetensors.index.json` names.
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let tensors = if single.exists() {
            read_header(&single)?
        } else if index.exists() {
            read_shards(dir, &index)?
        } else {
            return Err(Error::NoWeights { path: dir.to_path_buf() });
        };
        Ok(Self { dir: dir.to_path_buf(), tensors })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, in f32, row-major. `shape` is what the model expects.
    pub(crate) fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { name: name.into(), shape: shape.to_vec(), path: self.dir.clone() });
        };
        if entry.shape != shape {
            return Err(Error::TensorShape {
                name: name.into(),
                expected: shape.to_vec(),
                found: entry.shape.clone(),
                path: entry.path.clone(),
            });
        }
        let decode: fn(&[u8]) -> Vec<f32> = match entry.dtype {
            Dtype::F32 => |bytes| decode(bytes, f32::from_le_bytes),
            Dtype::F16 => |bytes| decode(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => |bytes| decode(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            other => {
                return Err(Error::TensorDtype {
                    name: name.into(),
                    dtype: format!("{other:?}"),
                    path: entry.path.clone(),
                });
            }
        };
        let io = |source| Error::Io { path: entry.path.clone(), source };
        let mut file = File::open(&entry.path).map_err(io)?;
        file.seek(SeekFrom::Start(entry.start)).map_err(io)?;
        let mut bytes = vec![0; entry.bytes];
        file.read_exact(&mut bytes).map_err(io)?;
        Ok(decode(&bytes))
    }
}

fn decode<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| convert(chunk)).collect()
}

fn read_shards(dir: &Path, index: &Path) -> Result<BTreeMap<String, Entry>, Error> {
    let text = std::fs::read_to_string(index).map_err(|source| Error::Io { path: index.to_path_buf(), source })?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|source| Error::Json { path: index.to_path_buf(), source })?;
    let contradiction = |reason| Error::Checkpoint { path: index.to_path_buf(), reason };

    let shards: BTreeSet<&String> = weight_map.values().collect();
    let mut tensors = BTreeMap::new();
    for shard in shards {
        for (name, entry) in read_header(&dir.join(shard))? {
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
        None => Ok(tensors),
    }
}

/// A safetensors file is an 8-byte little-endian length, that many bytes of JSON, and the data.
fn read_header(path: &Path) -> Result<BTreeMap<String, Entry>, Error> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let broken = |reason| Error::Checkpoint { path: path.to_path_buf(), reason };

    let mut file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    if file_bytes < length.len() as u64 {
        return Err(broken(format!("{file_bytes} bytes are no safetensors file")));
    }
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    let data = length.checked_add(8).filter(|&data| data <= file_bytes);
    let Some(data) = data else {
        return Err(broken(format!("a header of {length} bytes in a file of {file_bytes}")));
    };
    // Fits: it is less than the file's size, which was just read into memory terms by the system.
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    if data + metadata.data_len() as u64 != file_bytes {
        let reason = format!("{file_bytes} bytes, its header asks for {}", data + metadata.data_len() as u64);
        return Err(broken(reason));
    }
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (start, end) = info.data_offsets;
        let entry = Entry {
            path: path.to_path_buf(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: data + start as u64,
            bytes: end - start,
        };
        (name, entry)
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}
