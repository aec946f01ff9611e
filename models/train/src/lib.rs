//! What training a language model needs that is not the model.
//!
//! [`Tokenizer`] maps text to token ids and back: bytes, Hugging Face's `tokenizer.json`, or the ranks that Llama 3 is published with.
//! [`TensorFiles`] and [`write_shards`](tensor_files::write_shards) read and write safetensors, and
//! [`create_folder`] makes a checkpoint's folder whole or not at all.

mod folder;
mod lines;
pub mod tensor_files;
mod tokenizer;

pub use folder::{FolderError, create_folder, write_synced};
pub use lines::TokenizeError;
pub use tensor_files::{TensorFiles, TensorFilesError};
pub use tokenizer::{ByteTokenizer, SpecialTokens, TextStream, Tokenizer, TokenizerError};
