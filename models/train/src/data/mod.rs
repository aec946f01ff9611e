//! Training data in two stages: files to token files, and token files to sequences. Only a bounded
//! part of the data is in memory.
//!
//! ```text
//! source, search, kind, scan               which files, and how much of each
//! documents, parquet, json_array, pieces   what they hold
//! encode, tokenize, token_writer           its tokens, in a token file
//! ---------------------------------------------------------------------------------
//! token_file, split, part                  what is trained on, and what is held out
//! packing, order, sequences, position      sequences, in which order, from where on
//! ---------------------------------------------------------------------------------
//! cache, opener, dataset                   both
//! ```
//!
//! [`tokenize_source`] runs only the first stage. [`Dataset::open`] runs it into a cache on disk
//! for all sources that are neither token files nor cached. [`Dataset::train`] gives endless
//! [`TrainSequences`] in an order that depends only on seed and epoch. They resume from the
//! [`Position`] in a checkpoint. [`Dataset::held_out`] gives the validation sequences.

mod cache;
mod dataset;
mod documents;
mod encode;
mod error;
mod file_state;
mod json_array;
mod kept;
mod kind;
mod left_out;
mod opener;
mod order;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod part;
mod pieces;
mod position;
mod raw_file;
mod scan;
mod search;
mod sequences;
mod source;
mod split;
mod summary;
mod token_file;
mod token_writer;
mod tokenize;

pub use dataset::{Dataset, DatasetSize, SequenceShape, Validation};
pub(crate) use documents::next_line;
pub(crate) use error::MAX_DOCUMENT;
pub use error::{DataError, DocumentError};
pub use file_state::FileState;
pub use kept::KeptTokens;
pub use left_out::{LeftOut, Reason};
pub use packing::{Packing, Sequence};
pub use position::{Place, Position, SourceState, StreamPosition};
pub use sequences::TrainSequences;
pub use source::{DataSource, Format};
pub use summary::EpochSize;
pub use tokenize::{TokenizedDocument, TokenizedSource, first_documents, tokenize_source};

/// Field that holds a conversation.
const MESSAGES: &str = "messages";
/// Field that holds the tools of a conversation.
const TOOLS: &str = "tools";
/// Field with variables of the chat template. `enable_thinking` may also be a separate field.
const KWARGS: &str = "chat_template_kwargs";
const THINKING: &str = "enable_thinking";
