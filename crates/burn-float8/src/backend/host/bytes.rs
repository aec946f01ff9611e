//! [`CodeBytes`]: FP8 bytes, and whether they contain an e4m3 NaN.
use core::ops::Deref;
use std::sync::OnceLock;

use float8_kernels::Format;
use rayon::prelude::*;

use super::loops::TASK;

/// FP8 codes.
pub(super) struct CodeBytes {
    bytes: Vec<u8>,
    has_nan: OnceLock<bool>,
}

impl CodeBytes {
    /// Whether a code is the NaN of e4m3. Unlike the NaNs of e5m2, it does not decode to NaN by a
    /// shift of its bits. The bytes are read once.
    pub(super) fn has_nan(&self, format: Format) -> bool {
        let is_nan = |code: &u8| code & 0x7f == 0x7f;
        let any = || self.bytes.par_chunks(TASK).any(|codes| codes.iter().fold(false, |any, code| any | is_nan(code)));
        format == Format::E4m3 && *self.has_nan.get_or_init(any)
    }
}

impl From<Vec<u8>> for CodeBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, has_nan: OnceLock::new() }
    }
}

impl Deref for CodeBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
