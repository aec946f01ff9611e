//! Token files as written by llm.c, llmq and the first stage.

use crate::*;
use proptest::prelude::*;

/// Magic, version and bytes per token.
pub const GPT_2: (u32, u32, usize) = (20240520, 1, 2);
pub const LLAMA_3: (u32, u32, usize) = (20240801, 7, 4);

/// Token file of llm.c.
pub fn token_file((magic, version, width): (u32, u32, usize), tokens: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [magic, version, tokens.len() as u32].iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()));
    bytes
}

/// Token file of llmq.
pub fn llmq(version: u32, tokens: &[u32], mask: Option<&[bool]>) -> Vec<u8> {
    let numbers = [version, 4, tokens.len() as u32, 257, u32::from(mask.is_some())];
    let mut bytes = [b"BIN.TOK\n".to_vec(), numbers.iter().flat_map(|number| number.to_le_bytes()).collect()].concat();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    let byte = |bits: &[bool]| bits.iter().enumerate().map(|(i, bit)| u8::from(*bit) << i).sum::<u8>();
    bytes.extend(mask.unwrap_or_default().chunks(8).map(byte));
    bytes
}

/// Two documents after the end of another one.
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
    let files = Files::new([("a.bin", token_file(GPT_2, &TOKENS))]);
    let source = DataSource { max_bytes: Some(1024 + 11), ..files.source("a.bin") };
    assert_eq!(files.tokens(source), TOKENS[..5]);
    // The end is held out.
    let dataset = files.open(&files.sources(), 0.3).unwrap();
    assert_eq!((stream(&dataset).0, held_out_stream(&dataset)), (TOKENS[..9].to_vec(), TOKENS[9..].to_vec()));
    // Documents are found by BOS in any window, and kept whole.
    let mut sequences = epoch(&files.all(), whole(5)).unwrap();
    sequences.sort_by_key(|sequence| sequence.tokens.clone());
    let parts: Vec<_> = sequences.iter().map(|s| (&s.tokens[..s.num_tokens], &s.document_starts[..])).collect();
    assert_eq!(parts, [(&TOKENS[..6], &[2][..]), (&TOKENS[6..], &[0])]);
    // By default, files with a mask keep documents whole.
    let files = Files::new([("a.bin", llmq(2, &TOKENS, Some(&[true; 12])))]);
    assert_eq!(epoch(&files.all(), by_default(5)).unwrap(), epoch(&files.all(), whole(5)).unwrap());
}

/// Documents that a file does not list are found once. Begins that cannot be are not used.
#[test]
fn documents_are_found_once() {
    let files = Files::new([("a.bin", token_file(GPT_2, &TOKENS))]);
    let count = || files.all().train(whole(5), 1).unwrap().sequences_per_epoch()[0];
    assert_eq!(count(), 2);
    let mut entries = fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().path());
    let memory = entries.find(|path| path.extension().is_some_and(|extension| extension == "starts")).unwrap();
    for (starts, expected) in [(&[4_u64, 8][..], 3), (&[4, 99], 2), (&[8, 4], 2)] {
        fs::write(&memory, starts.iter().flat_map(|start| start.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        assert_eq!(count(), expected, "{starts:?}");
    }
}

/// Without BOS, a document begins after EOS.
#[test]
fn documents_end_with_eos_where_there_is_no_bos() {
    let folder = Files::new([("tokenizer_config.json", "{\"add_bos_token\": false, \"eos_token\": \"!\"}")]);
    fs::copy(tokenizer_file(), folder.path("tokenizer.json")).unwrap();
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
fn a_wrong_header_is_named() {
    let right = token_file(GPT_2, &TOKENS);
    let mut count = right.clone();
    count[8] = 13;
    let cut = right[..right.len() - 1].to_vec();
    for (content, expected) in [
        (right[..1000].to_vec(), "it has 1000 bytes, its header alone would have 1024"),
        (cut, "its header says 12 tokens, with which it would have 1048 bytes; it has 1047"),
        (count, "its header says 13 tokens, with which it would have 1050 bytes; it has 1048"),
        (token_file((1, 1, 2), &TOKENS), "it begins with 1 and version 1; 20240520 and 1 (GPT-2)"),
        (token_file((20240520, 2, 2), &TOKENS), "it begins with 20240520 and version 2;"),
        (llmq(3, &TOKENS, None), "version 3 with 4 bytes a token; versions 1 and 2 with 4 bytes are read"),
        (llmq(2, &TOKENS, Some(&[true; 20])), "12 tokens, with which it would have 1074 bytes; it has 1075"),
    ] {
        let error = Files::new([("a.bin", content)]).error_of_file("a.bin");
        assert!(error.contains("a.bin is no token file: ") && error.contains(expected), "{error}");
    }
    // In a folder, `.bin` files may belong to another program.
    let files = Files::new([("a.bin", &right[..1000]), ("b.txt", b"some text")]);
    assert_eq!((files.all().size().files, files.all().left_out().count()), (1, 1));
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
            "{}: token 300 at place 2 (byte {byte}), but the tokenizer, or the model, has ids below 257: use those that this file was made for",
            files.path("a.bin").display()
        );
        assert_eq!(error, expected);
    }
}

/// Tokenizes all files into a folder next to them.
fn tokenized(files: &Files, name: &str) -> anyhow::Result<(PathBuf, TokenizedSource)> {
    let (source, to) = (files.sources().remove(0), files.dir.path().join(name));
    let tokenized = tokenize_source(&source, &Tokenizer::bytes(), Some(&template("")), &to, &mut |_| {})?;
    Ok((to, tokenized))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    /// A token file gives the same training and validation sequences as the text and conversations
    /// from which it was made.
    #[test]
    fn the_first_stage_changes_nothing(
        lens in proptest::collection::vec((any::<bool>(), 1..40_usize), 2..30), fraction in 0.0..0.7, seq_len in 1..40_usize,
    ) {
        let line = |(is_chat, len): &(bool, usize)| match is_chat {
            true => json!({ "messages": [Message::new("user", "hi"), Message::new("assistant", "x".repeat(*len))] }),
            false => json!({ "text": "y".repeat(*len) }),
        };
        let lines: Vec<String> = lens.iter().map(|document| line(document).to_string()).collect();
        let files = Files::new([("a.jsonl", lines.join("\n")), ("b.txt", "z".repeat(50))]);
        let (to, size) = tokenized(&files, "tokens").unwrap();
        let template = template("");
        let open = |source| files.open_with(&[source], fraction, &Tokenizer::bytes(), Some(&template)).unwrap();
        let (raw, tokens) = (open(files.sources().remove(0)), open(DataSource::new([to])));
        prop_assert!(tokens.was_cached() && (size.files, size.documents) == (2, lens.len() as u64 + 1));
        prop_assert_eq!(size.tokens, raw.size().train_tokens + raw.size().held_out_tokens);
        prop_assert_eq!(tokens.has_conversations(), raw.has_conversations());
        prop_assume!(raw.size().train_tokens > seq_len as u64);
        for shape in [wrapped(seq_len), whole(seq_len), by_default(seq_len)] {
            prop_assert_eq!(epoch(&tokens, shape).unwrap(), epoch(&raw, shape).unwrap());
            let [raw, tokens] = [&raw, &tokens].map(|dataset| {
                let held_out = dataset.held_out(shape, usize::MAX).map_err(|error| error.to_string());
                (held_out, dataset.train(shape, 0).unwrap().epoch_size())
            });
            prop_assert_eq!(tokens, raw);
        }
    }
}

/// A file cut by `max_bytes` has the documents before the cut.
#[test]
fn some_of_the_tokens_of_the_first_stage() {
    let files = Files::new([("a.jsonl", lines(["0123456789"; 5]))]);
    let (to, _) = tokenized(&files, "tokens").unwrap();
    let source = DataSource { max_bytes: Some(1024 + 2 * 30), ..DataSource::new([&to]) };
    let dataset = files.open(&[source], 0.0).unwrap();
    assert_eq!(stream(&dataset), (documents(["0123456789"; 3])[..30].to_vec(), vec![0, 11, 22]));
}

#[test]
fn what_the_first_stage_does_not_take() {
    let files = Files::new([("a.txt", "some text")]);
    let (to, _) = tokenized(&files, "tokens").unwrap();
    let error = files.open_with(&[DataSource::new([&to])], 0.0, &folder_with_tokenizer(), None).unwrap_err();
    let expected = format!("{} was made with another tokenizer", to.join("tokens.bin").display());
    assert!(message(&error).starts_with(&expected), "{error}");
    let error = message(&tokenized(&files, "tokens").unwrap_err());
    assert!(error.contains("tokens exists and is not an empty folder"), "{error}");
    fs::copy(to.join("tokens.bin"), files.path("b.bin")).unwrap();
    let error = message(&tokenized(&files, "other").unwrap_err());
    assert!(error.ends_with("b.bin holds tokens already: give text to tokenize"), "{error}");
    let files = Files::new([("a.jsonl", "{\"text\": 1}")]);
    assert!(message(&tokenized(&files, "tokens").unwrap_err()).contains("a.jsonl:1: `text` is a number"));
    assert!(!files.dir.path().join("tokens").exists());
}

/// An overwritten file: starts that are not ascending and sizes beyond the file are errors.
#[test]
fn a_token_file_that_contradicts_itself_is_named() {
    let files = Files::new([("a.jsonl", lines(["some"; 3]))]);
    let (to, _) = tokenized(&files, "tokens").unwrap();
    let right = fs::read(to.join("tokens.bin")).unwrap();
    assert_eq!(right.len(), 1024 + 2 * 15 + 8 * 3);
    let header = r#"{"dtype":"uint16","tokens":15,"has_mask":false,"documents":3,"tokenizer":""#;
    assert!(right.starts_with(header.as_bytes()));
    let refused = |bytes: &[u8], expected: &str| {
        fs::write(to.join("tokens.bin"), bytes).unwrap();
        let error = files.error_of(&[DataSource::new([to.join("tokens.bin")])]);
        assert!(error.contains("tokens.bin is no token file") && error.contains(expected), "{error}");
    };
    for (was, is, expected) in [
        ("uint16", "uint24", "unknown variant `uint24`, expected `uint16` or `uint32`"),
        ("dtype", "width", "unknown field `width`"),
        ("false", "true", "its header says 15 tokens, with which it would have 1080 bytes; it has 1078"),
        (":15", ":14", "its header says 14 tokens, with which it would have 1076 bytes; it has 1078"),
        (":15", ":9223372036854775807", "with which it would have 18446744073709552662 bytes; it has 1078"),
        (":3", ":2305843009213693951", "with which it would have 18446744073709552662 bytes; it has 1078"),
        (":3", ":-3", "invalid value: integer `-3`"),
    ] {
        let mut bytes = String::from_utf8(right[..1024].to_vec()).unwrap().trim_end().replacen(was, is, 1).into_bytes();
        bytes.resize(1024, b' ');
        refused(&[&bytes, &right[1024..]].concat(), expected);
    }
    for (document, start) in [(0, 1_u64), (1, 0), (2, 15)] {
        let (mut bytes, place) = (right.clone(), 1024 + 2 * 15 + 8 * document);
        bytes[place..place + 8].copy_from_slice(&start.to_le_bytes());
        refused(&bytes, &format!("document {document} begins at token {start}, which cannot be"));
    }
}
