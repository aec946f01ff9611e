//! What training a language model needs that is not the model.
//!
//! [`Tokenizer`] maps text to token ids and back: bytes, Hugging Face's `tokenizer.json`, or the ranks that Llama 3 is published with.
//! [`ChatTemplate`] turns a conversation into the ids that a chat model reads, and knows which of them the assistant says.
//! [`Dataset`] turns files into sequences of tokens to train on, of which a bounded part is in memory.

mod chat;
mod data;
mod digest;
mod lines;
pub mod rng;
mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Conversation, Message};
pub use data::{
    DataError, DataSource, Dataset, DatasetSize, DocumentError, FileState, Format, Packing, Place, Position, Progress,
    Sequence, SequenceShape, SourceState, StreamPosition, TrainSequences,
};
pub use lines::TokenizeError;
pub use tokenizer::{ByteTokenizer, SpecialTokens, TextStream, Tokenizer, TokenizerError};
