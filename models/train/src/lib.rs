//! What training a language model needs that is not the model.
//!
//! [`Tokenizer`] maps text to token ids and back: bytes, Hugging Face's `tokenizer.json`, or the ranks that Llama 3 is published with.

mod lines;
mod tokenizer;

pub use lines::TokenizeError;
pub use tokenizer::{ByteTokenizer, SpecialTokens, TextStream, Tokenizer, TokenizerError};
