//! What the programs of `tests/compile_fail.rs` are compiled with.

pub use {burn, burn_float8};
