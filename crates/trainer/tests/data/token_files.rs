//! Token files as written by the first stage.

use crate::*;
use proptest::prelude::*;

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

#[test]
fn a_wrong_header_is_named() {
    let content = [b"{\"dtype\":\"uint16\"}".to_vec(), vec![b' '; 2000]].concat();
    for (content, expected) in [
        (content[..1000].to_vec(), "it has 1000 bytes, its header alone would have 1024"),
        (content, "its format is none, and this version reads 1: tokenize again"),
        (vec![0; 2000], "only token files of `float8 tokenize` are read"),
    ] {
        let files = Files::new([("a.bin", content), ("b.txt", b"some text".to_vec())]);
        let error = files.error_of(&[files.source("a.bin")]);
        let begin = format!("{} is no token file: {expected}", files.path("a.bin").display());
        assert!(error.starts_with(&begin), "{error}");
    }
    // In a folder, `.bin` files may belong to another program.
    let files = Files::new([("a.bin", vec![0; 2000]), ("b.txt", b"some text".to_vec())]);
    assert_eq!((files.all().size().files, files.all().left_out().count()), (1, 1));
    // One that begins like a token file is never left out.
    let files = Files::new([("a.bin", [b"{\"".to_vec(), vec![b' '; 2000]].concat()), ("b.txt", b"some text".to_vec())]);
    assert!(files.error_of(&files.sources()).contains("a.bin is no token file"));
    let source = DataSource { format: Some(Format::Bin), ..files.source("b.txt") };
    assert!(files.error_of(&[source]).contains("b.txt is no token file"));
}

/// Tokens are checked when they are read.
#[test]
fn a_token_that_is_none_is_named() {
    let files = Files::new([("a.txt", "some text")]);
    let (to, _) = tokenized(&files, "tokens").unwrap();
    let path = to.join("tokens.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[1024 + 4..][..2].copy_from_slice(&300_u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let dataset = files.open(&[DataSource::new([&to])], 0.0).unwrap();
    let error = message(&epoch(&dataset, wrapped(9)).unwrap_err());
    let expected = format!(
        "{}: token 300 at place 2 (byte 1028), but the tokenizer, or the model, has ids below 257: use those that this file was made for",
        path.display()
    );
    assert_eq!(error, expected);
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
    let header = r#"{"format":1,"dtype":"uint16","tokens":15,"has_mask":false,"documents":3,"tokenizer":""#;
    assert!(right.starts_with(header.as_bytes()));
    let refused = |bytes: &[u8], expected: &str| {
        fs::write(to.join("tokens.bin"), bytes).unwrap();
        let error = files.error_of(&[DataSource::new([to.join("tokens.bin")])]);
        assert!(error.contains("tokens.bin is no token file") && error.contains(expected), "{error}");
    };
    for (was, is, expected) in [
        ("format\":1", "format\":2", "its format is 2, and this version reads 1: tokenize again"),
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
