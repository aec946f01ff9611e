//! Everything that can be wrong with tensors in files, or with writing them.

use std::path::PathBuf;

/// What is wrong with tensors in files, or with writing them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFilesError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file's header, or an index, is not the JSON that it should be.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A folder without tensors.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json", folder.display())]
    NoTensors {
        /// The folder.
        folder: PathBuf,
    },
    /// A file that an index names is not there.
    #[error("{} is not there, in which {} has the tensor {name}", path.display(), index.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// The first tensor that is in it.
        name: String,
        /// The index that says so.
        index: PathBuf,
    },
    /// A file that is not a whole safetensors file, or an index that contradicts its shards.
    #[error("{}: {reason}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file holds tensors that the model has no place for.
    #[error("{} holds tensors that the model does not have: {}", path.display(), names.join(", "))]
    Unexpected {
        /// Their names, sorted; the last may say how many more there are.
        names: Vec<String>,
        /// The file that holds them, or the folder if several do.
        path: PathBuf,
    },
    /// A tensor is not there.
    #[error("{} lacks the tensor {name} {shape:?}", path.display())]
    Missing {
        /// Its name.
        name: String,
        /// The shape that it should have.
        shape: Vec<usize>,
        /// The file or folder.
        path: PathBuf,
    },
    /// A tensor has another shape than it should have.
    #[error("{}: {name} has shape {found:?}, the model needs {expected:?}", path.display())]
    Shape {
        /// Its name.
        name: String,
        /// The shape that it should have.
        expected: Vec<usize>,
        /// What the file holds.
        found: Vec<usize>,
        /// The file.
        path: PathBuf,
    },
    /// A tensor that is asked for in f32 has a dtype that does not widen to it.
    #[error("{}: {name} has dtype {dtype}; F32, F16, BF16 and, of linears, F8_E4M3 are read", path.display())]
    Dtype {
        /// Its name.
        name: String,
        /// The dtype in the file.
        dtype: String,
        /// The file.
        path: PathBuf,
    },
    /// Tensors that no safetensors file can hold.
    #[error("cannot write {}: {reason}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why, naming the tensor.
        reason: String,
    },
}
