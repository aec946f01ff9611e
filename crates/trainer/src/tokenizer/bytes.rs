//! Byte-level tokens: token i < 256 is the byte i, and 256 begins a document.

/// Constants of byte-level tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Number of tokens that are text.
    pub const NUM_BYTES: usize = 256;
    /// Token that begins every document.
    pub const BOS: u32 = 256;
    /// Number of tokens in use.
    pub const VOCAB_SIZE: usize = 257;
    /// `VOCAB_SIZE` rounded up to a multiple of 16, which suits FP8 GEMMs.
    pub const PADDED_VOCAB_SIZE: usize = Self::VOCAB_SIZE.next_multiple_of(16);
}
