//! Dependencies of the programs in `tests/compile_fail.rs`.

pub use {burn, burn_float8};
