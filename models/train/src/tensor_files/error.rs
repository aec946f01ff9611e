//! Errors of reading and writing tensors in files.

use std::path::PathBuf;

/// Error of reading or writing tensors in files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFilesError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file's header or an index is not the expected JSON.
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
    /// A file that an index names is missing.
    #[error("{} is not there, in which {} has the tensor {name}", path.display(), index.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// First tensor in the file.
        name: String,
        /// Index that names the file.
        index: PathBuf,
    },
    /// A file that is not a complete safetensors file, or an index that contradicts its shards.
    #[error("{}: {reason}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// Problem with the file.
        reason: String,
    },
    /// A file holds tensors that the model does not have.
    #[error("{} holds tensors that the model does not have: {}", path.display(), names.join(", "))]
    Unexpected {
        /// Their names, sorted. The last may be the number of further tensors.
        names: Vec<String>,
        /// The file that holds them, or the folder if several do.
        path: PathBuf,
    },
    /// A tensor is missing.
    #[error("{} lacks the tensor {name} {shape:?}", path.display())]
    Missing {
        /// Name of the tensor.
        name: String,
        /// Expected shape.
        shape: Vec<usize>,
        /// The file or folder.
        path: PathBuf,
    },
    /// A tensor has an unexpected shape.
    #[error("{}: {name} has shape {found:?}, the model needs {expected:?}", path.display())]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Expected shape.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
        /// The file.
        path: PathBuf,
    },
    /// A tensor requested as f32 has a dtype that does not widen to it.
    #[error("{}: {name} has dtype {dtype}; F32, F16, BF16 and, of linears, F8_E4M3 are read", path.display())]
    Dtype {
        /// Name of the tensor.
        name: String,
        /// Dtype in the file.
        dtype: String,
        /// The file.
        path: PathBuf,
    },
    /// Tensors that a safetensors file cannot hold.
    #[error("cannot write {}: {reason}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Reason, with the name of the tensor.
        reason: String,
    },
}
