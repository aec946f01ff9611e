//! Files of tokens, as llm.c and llmq write them.

use proptest::prelude::*;
use train::{DataSource, Format, Tokenizer};

use crate::{Files, by_default, epoch, held_out_stream, message, stream, whole, wrapped};

/// Magic, version and bytes of a token.
pub const GPT_2: (u32, u32, usize) = (20240520, 1, 2);
pub const LLAMA_3: (u32, u32, usize) = (20240801, 7, 4);

/// A token file of llm.c.
pub fn token_file((magic, version, width): (u32, u32, usize), tokens: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [magic, version, tokens.len() as u32].iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()));
    bytes
}

/// A token file of llmq.
fn llmq(version: u32, tokens: &[u32], mask: Option<&[bool]>) -> Vec<u8> {
    let numbers = [version, 4, tokens.len() as u32, 257, u32::from(mask.is_some())];
    let mut bytes = [b"BIN.TOK\n".to_vec(), numbers.iter().flat_map(|number| number.to_le_bytes()).collect()].concat();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    let byte = |bits: &[bool]| bits.iter().enumerate().map(|(i, bit)| u8::from(*bit) << i).sum::<u8>();
    bytes.extend(mask.unwrap_or_default().chunks(8).map(byte));
    bytes
}

/// Two documents and the end of one before.
const TOKENS: [u32; 12] = [7, 8, 256, 1, 2, 3, 256, 255, 0, 4, 5, 6];

#[test]
fn each_format_is_read() {
    for content in
        [token_file(GPT_2, &TOKENS), token_file(LLAMA_3, &TOKENS), llmq(1, &TOKENS, None), llmq(2, &TOKENS, None)]
    {
        let files = Files::new([("a.bin", content)]);
        let dataset = files.all();
        assert_eq!(stream(&dataset), (TOKENS.to_vec(), vec![2, 6]));
        assert!(dataset.was_cached());
    }
}

/// Documents are found by BOS in any window, and kept whole.
#[test]
fn documents_of_a_token_file_stay_whole() {
    let files = Files::new([("a.bin", token_file(GPT_2, &TOKENS))]);
    let mut sequences = epoch(&files.all(), whole(5)).unwrap();
    sequences.sort_by_key(|sequence| sequence.tokens.clone());
    let parts: Vec<_> = sequences.iter().map(|s| (&s.tokens[..s.num_tokens], &s.document_starts[..])).collect();
    assert_eq!(parts, [(&TOKENS[..6], &[2][..]), (&TOKENS[6..], &[0])]);
}

/// Without BOS, a document begins after EOS.
#[test]
fn documents_end_with_eos_where_there_is_no_bos() {
    let folder = Files::new([("tokenizer_config.json", "{\"add_bos_token\": false, \"eos_token\": \"!\"}")]);
    let tokenizer = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tokenizer.json");
    std::fs::copy(tokenizer, folder.path("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.root()).unwrap();
    let eos = tokenizer.eos().unwrap();
    assert_eq!(tokenizer.bos(), None);
    let tokens = [1, 2, eos, 11, 12, 13, eos, 14, 15];
    let files = Files::new([("a.bin", token_file(LLAMA_3, &tokens))]);
    let dataset = files.open_with(&files.sources(), 0.0, &tokenizer, None).unwrap();
    assert_eq!(stream(&dataset), (tokens.to_vec(), vec![0, 3, 7]));
    for sequence in epoch(&dataset, wrapped(2)).unwrap() {
        let begin = tokens.windows(3).position(|window| window == sequence.tokens).unwrap();
        let expected: Vec<usize> = [0, 3, 7].into_iter().filter(|start| (begin..begin + 3).contains(start)).collect();
        assert_eq!(sequence.document_starts, expected.iter().map(|start| start - begin).collect::<Vec<_>>());
    }
}

#[test]
fn the_end_is_held_out() {
    let files = Files::new([("a.bin", token_file(GPT_2, &TOKENS))]);
    let dataset = files.open(&files.sources(), 0.3).unwrap();
    assert_eq!(stream(&dataset).0, TOKENS[..9]);
    assert_eq!(held_out_stream(&dataset), TOKENS[9..]);
}

#[test]
fn some_of_a_token_file() {
    let files = Files::new([("a.bin", token_file(GPT_2, &TOKENS))]);
    let source = DataSource { max_bytes: Some(1024 + 11), ..files.source("a.bin") };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, TOKENS[..5]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bits of any range are those of its tokens; by default, files with a mask keep documents whole.
    #[test]
    fn a_mask_of_llmq(bits in proptest::collection::vec(any::<bool>(), 20..60), seq_len in 1..9_usize) {
        let tokens: Vec<u32> = (0..bits.len() as u32).collect();
        let files = Files::new([("a.bin", llmq(2, &tokens, Some(&bits)))]);
        let dataset = files.open(&files.sources(), 0.2).unwrap();
        let check = |sequences: Vec<train::Sequence>| for sequence in sequences {
            for target in 1..sequence.num_tokens {
                let counts = sequence.loss_mask.as_ref().is_none_or(|mask| mask[target - 1]);
                assert_eq!(counts, bits[sequence.tokens[target] as usize]);
            }
        };
        check(epoch(&dataset, wrapped(seq_len)).unwrap());
        check(dataset.held_out(wrapped(1), 100, Some).unwrap());
        prop_assert_eq!(epoch(&dataset, by_default(seq_len)).unwrap(), epoch(&dataset, whole(seq_len)).unwrap());
    }
}

#[test]
fn a_wrong_header_is_named() {
    let right = token_file(GPT_2, &TOKENS);
    let mut count = right.clone();
    count[8] = 13;
    for (content, expected) in [
        (right[..1000].to_vec(), "it has 1000 bytes, its header alone would have 1024"),
        (
            right[..right.len() - 1].to_vec(),
            "its header says 12 tokens, with which it would have 1048 bytes; it has 1047",
        ),
        (count, "its header says 13 tokens, with which it would have 1050 bytes; it has 1048"),
        (token_file((1, 1, 2), &TOKENS), "it begins with 1 and version 1; 20240520 and 1 (GPT-2)"),
        (token_file((20240520, 2, 2), &TOKENS), "it begins with 20240520 and version 2;"),
        (llmq(3, &TOKENS, None), "version 3 with 4 bytes a token; versions 1 and 2 with 4 bytes are read"),
        (
            llmq(2, &TOKENS, Some(&[true; 20])),
            "its header says 12 tokens, with which it would have 1074 bytes; it has 1075",
        ),
    ] {
        let files = Files::new([("a.bin", content), ("b.txt", b"some text".to_vec())]);
        let error = files.error_of(&[files.source("a.bin")]);
        let begin = format!("{} is no token file of llm.c or llmq: {expected}", files.path("a.bin").display());
        assert!(error.starts_with(&begin), "{error}");
    }
    // In a folder it may be a file of something else.
    let files = Files::new([("a.bin", &right[..1000]), ("b.txt", b"some text")]);
    assert_eq!((files.all().size().files, files.all().size().skipped), (1, 1));
    let source = DataSource { format: Some(Format::Bin), ..files.source("b.txt") };
    assert!(files.error_of(&[source]).contains("b.txt is no token file"));
}

/// Tokens are checked when they are read.
#[test]
fn a_token_that_is_none_is_named() {
    for (content, byte) in [(token_file(GPT_2, &[1, 2, 300, 4]), 1028), (token_file(LLAMA_3, &[1, 2, 300, 4]), 1032)] {
        let files = Files::new([("a.bin", content)]);
        let error = message(&epoch(&files.all(), wrapped(3)).unwrap_err());
        let expected = format!(
            "{}: token 300 at place 2 (byte {byte}), but the tokenizer has ids below 257: use the tokenizer that this file was made with",
            files.path("a.bin").display()
        );
        assert_eq!(error, expected);
    }
}
