//! Files that runs write: tensors, checkpoints, metrics and plots.
#![allow(missing_docs)]

mod checkpoints;
mod plot;
#[path = "../harness/table.rs"]
mod table;
mod tensor_files;
