//! What a model calls by name, on any backend: [`grouped_linear`].
mod grouped;

pub use grouped::{GroupedLinear, grouped_linear};
