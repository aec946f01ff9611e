//! Byte-level tokens: token i < 256 is the byte i; 256 begins a document.

/// Maps text to bytes and back; needs no vocabulary file.
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

    /// The bytes of `text`, without `BOS`.
    pub fn encode(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// The text of `tokens`: tokens that are no byte are left out, bytes that are not UTF-8 become `�`.
    pub fn decode(tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
