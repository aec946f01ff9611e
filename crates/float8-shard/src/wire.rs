//! Ranks exchange little-endian words of four bytes; the last word is padded with zeros.

/// Packs bytes into words.
pub(super) fn to_words(mut bytes: Vec<u8>) -> Vec<u32> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// First `len` bytes of the words.
pub(super) fn to_bytes(words: &[u32], len: usize) -> impl Iterator<Item = u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back() {
        for len in 0..9 {
            let bytes: Vec<u8> = (1..=len).collect();
            let words = to_words(bytes.clone());
            assert_eq!(words.len(), bytes.len().div_ceil(4));
            assert_eq!(to_bytes(&words, bytes.len()).collect::<Vec<_>>(), bytes);
        }
    }
}
