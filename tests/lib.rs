//! The conformance suite lives in `main.rs`; this library is empty so that the package has a target to build.
