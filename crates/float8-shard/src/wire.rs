//! Ranks exchange little-endian words of four bytes; the last word is padded with zeros.
use burn_std::bf16;

/// Packs bytes into words.
pub(super) fn to_words(mut bytes: Vec<u8>) -> Vec<u32> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// First `len` bytes of the words.
pub(super) fn to_bytes(words: &[u32], len: usize) -> impl Iterator<Item = u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take(len)
}

/// Values rounded to bf16, two in a word.
pub(super) fn bf16_words(values: Vec<f32>) -> Vec<u32> {
    to_words(values.into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect())
}

/// Sums equal parts of `ranks` ranks in f32, in rank order. Each word holds two bf16.
pub(super) fn sum_bf16(words: &[u32], ranks: usize) -> Vec<f32> {
    let part = words.len() / ranks;
    // A bf16 is the upper half of an f32.
    let of = |word: u32| [word << 16, word & 0xffff_0000].map(f32::from_bits);
    let sum = |i: usize| {
        (0..ranks).map(|rank| of(words[rank * part + i])).reduce(|[a, b], [c, d]| [a + c, b + d]).unwrap_or_default()
    };
    (0..part).flat_map(sum).collect()
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
