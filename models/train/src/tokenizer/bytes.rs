//! Byte-level tokens: token i < 256 is the byte i; 256 begins a document.

/// The numbers of byte-level tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Tokens that are text.
    pub const NUM_BYTES: usize = 256;
    /// Begins every document.
    pub const BOS: u32 = 256;
    /// Tokens in use.
    pub const VOCAB_SIZE: usize = 257;
    /// `VOCAB_SIZE` rounded up to a multiple of 16, which is what FP8 GEMMs like.
    pub const PADDED_VOCAB_SIZE: usize = Self::VOCAB_SIZE.next_multiple_of(16);
}
