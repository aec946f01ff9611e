//! Compares tokenizers with the Python originals, whose ids `vectors.py` recorded, and checks
//! errors in their files.

use crate::*;
use trainer::{ByteTokenizer, Conversation};

/// Test texts. Long ones are stored as repetitions.
fn strings() -> Vec<String> {
    let text = |row: Value| match row {
        Value::String(text) => text,
        row => {
            let [repeat, then] = ["repeat", "then"].map(|key| row[key].as_str().unwrap().to_string());
            repeat.repeat(row["times"].as_u64().unwrap() as usize) + &then
        }
    };
    table("vectors/strings").into_iter().map(text).collect()
}

/// Long rows of ids as `vectors.py` abbreviates them.
fn abbreviated(ids: &[u32]) -> Value {
    if ids.len() <= 2000 {
        return ids.into();
    }
    let digest = Sha256::digest(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({ "len": ids.len(), "sha256": hex })
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text += &stream.finish().unwrap();
    text
}

/// Compares ids and decoding, at once and streamed.
fn equals_the_original(tokenizer: &Tokenizer, expected: &str, special: SpecialTokens) {
    let (strings, expected) = (strings(), table::<Value>(expected));
    assert!(strings.len() >= 1000 && strings.len() == expected.len());
    for (text, expected) in strings.iter().zip(expected) {
        let ids = tokenizer.encode(text, special).unwrap();
        assert_eq!(abbreviated(&ids), expected, "{:?}", text.chars().take(80).collect::<String>());
        assert_eq!(&tokenizer.decode(&ids).unwrap(), text);
        // Each step of the streaming decoder reads all text that is still open. The longest text
        // takes a quarter of a second.
        if ids.len() < 30_000 {
            assert_eq!(&streamed(tokenizer, &ids), text);
        }
    }
}

/// Decodes ids whose bytes are not UTF-8 like the original. The streamed pieces give the same text.
fn decodes_broken_text_like_the_original(tokenizer: &Tokenizer, name: &str) {
    #[derive(Deserialize)]
    struct Row {
        ids: Vec<u32>,
        text: String,
    }
    let rows = table::<Row>(name);
    assert!(rows.len() >= 300);
    for Row { ids, text } in rows {
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{ids:?}");
        assert_eq!(streamed(tokenizer, &ids), text, "{ids:?}");
    }
}

#[test]
fn hugging_face_gives_the_ids_of_the_original() {
    let tokenizer = Tokenizer::from_folder(vectors()).unwrap();
    equals_the_original(&tokenizer, "vectors/hf_text", SpecialTokens::AreText);
    equals_the_original(&tokenizer, "vectors/hf_special", SpecialTokens::InText);
    decodes_broken_text_like_the_original(&tokenizer, "vectors/broken_hf");
}

/// Llama 3's `tokenizer.model` at the path `FLOAT8_LLAMA3_TOKENIZER`. Its licence forbids to commit
/// it.
fn llama3_file() -> Option<PathBuf> {
    let path = std::env::var_os("FLOAT8_LLAMA3_TOKENIZER").map(PathBuf::from);
    if path.is_none() {
        test_data::skip("Llama 3's tokenizer.model, named by FLOAT8_LLAMA3_TOKENIZER (CONTRIBUTING.md)");
    }
    path
}

#[test]
fn llama3_gives_the_ids_of_the_original() {
    let Some(path) = llama3_file() else { return };
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    assert_eq!(tokenizer.vocab_size(), 128_256);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(128_000), Some(128_001)));
    assert_eq!(tokenizer.stop(), [128_001, 128_008, 128_009]);
    equals_the_original(&tokenizer, "vectors/llama3_text", SpecialTokens::AreText);
    equals_the_original(&tokenizer, "vectors/llama3_special", SpecialTokens::InText);
    decodes_broken_text_like_the_original(&tokenizer, "vectors/broken_llama3");

    let source = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}\
                  {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}";
    let template = ChatTemplate::new(source, [("bos_token", "<|begin_of_text|>")]).unwrap();
    let messages = [("user", "naïve 漢字?"), ("assistant", "\u{a0}👩‍👩‍👧‍👦 漢")].map(|(role, text)| Message::new(role, text));
    let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
    assert_eq!(ids, tokenizer.encode(&template.render(&messages, false).unwrap(), SpecialTokens::InText).unwrap());
    let first = is_assistant.iter().position(|is| *is).unwrap();
    assert!(is_assistant[first..].iter().all(|is| *is));
    assert_eq!(tokenizer.decode(&ids[first..]).unwrap(), "\u{a0}👩‍👩‍👧‍👦 漢<|eot_id|>");

    // An incomplete file.
    let (folder, text) = (tempfile::tempdir().unwrap(), fs::read_to_string(path).unwrap());
    let damaged = folder.path().join("tokenizer.model");
    let error = |text: &str| {
        fs::write(&damaged, text).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap_err().to_string()
    };
    let half: String = text.split_inclusive('\n').take(64_000).collect();
    assert!(error(&half).contains("has 64000 ranks, Llama 3's tokenizer.model has 128000"));
    let lines: Vec<_> = text.lines().collect();
    let first = format!("{} 6", lines[0].split(' ').next().unwrap());
    for (line, expected) in [
        ("Jw==7", ":7: expected BASE64 RANK"),
        ("J*== 6", ":7: \"J*==\" is not base64"),
        ("Jw== six", ":7: \"six\" is not a rank"),
        ("Jw== 7", ":7: rank 7 where 6 is expected"),
        (&first, ":7: an earlier line has this token"),
        ("AAAAAAAA 6", "no line has the byte"),
    ] {
        let mut lines = lines.clone();
        lines[6] = line;
        let error = error(&lines.join("\n"));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn bytes_are_their_own_ids() {
    let tokenizer = Tokenizer::open("bytes").unwrap();
    for text in strings() {
        let ids = tokenizer.encode(&text, SpecialTokens::InText).unwrap();
        assert!(ids.iter().map(|id| *id as u8).eq(text.bytes()));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(streamed(&tokenizer, &ids), text);
    }
    assert_eq!(tokenizer.document("é").unwrap(), [ByteTokenizer::BOS, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&[0xc3, 0x28, 0xc3]).unwrap(), "\u{fffd}(\u{fffd}");
    assert_eq!((tokenizer.vocab_size(), tokenizer.num_choices(), tokenizer.stop()), (257, 256, &[][..]));
    let error = tokenizer.decode(&[97, 300]).unwrap_err();
    assert_eq!(error.to_string(), "300 is no token: the tokenizer has ids below 257");
}

/// A character comes whole; bytes that can never be valid, and an incomplete character, are replaced.
#[test]
fn a_stream_ends_no_character_early() {
    for (bytes, pieces, end) in [
        ("né👩".as_bytes(), &["n", "", "é", "", "", "", "👩"][..], ""),
        (&[0xf0, 0x9f, 0x41, 0xe2, 0x82], &["", "", "\u{fffd}A", "", ""], "\u{fffd}"),
    ] {
        let tokenizer = Tokenizer::bytes();
        let mut stream = tokenizer.stream();
        let found: Vec<_> = bytes.iter().map(|byte| stream.push(u32::from(*byte)).unwrap()).collect();
        assert_eq!(
            (&found[..], &*stream.finish().unwrap()),
            (&pieces.iter().map(|p| p.to_string()).collect::<Vec<_>>()[..], end)
        );
    }
}

/// The full text has special tokens, the text for a reader has none.
#[test]
fn streams_keep_special_tokens_or_leave_them_out() {
    let tokenizer = Tokenizer::from_file(vectors().join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode("<|begin_of_text|>hi", SpecialTokens::InText).unwrap();
    assert_eq!(tokenizer.stream().read(&ids).unwrap(), "<|begin_of_text|>hi");
    assert_eq!(tokenizer.stream_text().read(&ids).unwrap(), "hi");
}

/// Opens a folder with the vectors' tokenizer and these files: texts, or JSON. Of tokenizer.json only
/// the keys that change are given.
fn open(files: &Value) -> anyhow::Result<Tokenizer> {
    let (mut files, mut tokenizer) = (files.clone(), tokenizer_json());
    if !files["tokenizer.json"].is_string() {
        tokenizer.as_object_mut().unwrap().extend(files["tokenizer.json"].as_object().cloned().unwrap_or_default());
        files["tokenizer.json"] = tokenizer;
    }
    Tokenizer::from_folder(folder(&files).path())
}

/// BOS, EOS, the tokens that end generation, and the length of a document of one token, by the files.
/// config.json decides the end of a text, as transformers makes a generation_config.json from it. If
/// nothing in the files puts BOS before a text, there is none: the rule of transformers.
#[test]
fn the_files_beside_it_say_what_begins_and_ends_a_text() {
    type Marks = (Option<u32>, Option<u32>, Vec<u32>, usize);
    for (files, marks) in table::<(Value, Marks)>("vectors/token_marks") {
        let tokenizer = open(&files).unwrap();
        let found =
            (tokenizer.bos(), tokenizer.eos(), tokenizer.stop().to_vec(), tokenizer.document("a").unwrap().len());
        assert_eq!(found, marks, "{files}");
    }
}

/// Files that contradict the tokenizer, on which the library panics, aborts or allocates 4 GB, that
/// would make gigabytes from a short text, or take hours for one.
#[test]
fn files_that_contradict_the_tokenizer_are_errors() {
    for (files, says) in table::<(Value, String)>("refusals/tokenizers") {
        let error = open(&files).unwrap_err().to_string();
        assert!(error.contains(&says), "{error}");
    }
}

/// The files beside tokenizer.json may add tokens, each with one id. A token under a key of its own
/// precedes a list of tokens, as in transformers. A row has the files, a text, its ids with special
/// tokens, and whether the added tokens change the tokenizer's fingerprint.
#[test]
fn the_files_beside_it_may_have_more_tokens() {
    let plain = open(&json!({})).unwrap();
    for (files, text, ids, is_new) in table::<(Value, String, Vec<u32>, bool)>("vectors/token_files") {
        let tokenizer = open(&files).unwrap();
        assert_eq!(tokenizer.encode(&text, SpecialTokens::InText).unwrap(), ids, "{files}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{files}");
        assert_eq!(tokenizer.fingerprint() != plain.fingerprint(), is_new, "{files}");
    }
    // A special token is no token of plain text, an added one is.
    for (special, len) in [(true, 2..9), (false, 1..2)] {
        let files = json!({"tokenizer_config.json": {"added_tokens_decoder": {"1001": {"content": "<|x|>", "special": special}}}});
        assert!(len.contains(&open(&files).unwrap().encode("<|x|>", SpecialTokens::AreText).unwrap().len()), "{files}");
    }
}

/// A model may have fewer tokens than its tokenizer, as long as no text has the others.
#[test]
fn a_token_that_the_model_does_not_have_is_an_error() {
    let open = || open(&json!({"added_tokens.json": {"<y>": 1001}})).unwrap();
    let tokenizer = open().for_vocabulary(1001).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.num_choices()), (1001, 1001));
    let encode = |tokenizer: &Tokenizer, text| tokenizer.encode(text, SpecialTokens::AreText);
    assert_eq!(encode(&tokenizer, "abc").unwrap(), encode(&open(), "abc").unwrap());
    let expected = "token 1001 (\"<y>\") in \"ab<y>cd\" is none of the model, whose vocabulary has 1001";
    assert_eq!(encode(&tokenizer, "ab<y>cd").unwrap_err().to_string(), expected);
    // Each text begins with 0.
    let error = open().for_vocabulary(0).unwrap_err().to_string();
    assert!(error.contains("bos_token of each text is token 0"), "{error}");
}

/// Conversations need no EOS; plain text ends with it.
#[test]
fn an_eos_that_the_model_does_not_have_is_an_error_of_plain_text() {
    let tokenizer = open(&json!({"tokenizer_config.json": {"eos_token": "</s>"}})).unwrap();
    let tokenizer = tokenizer.for_vocabulary(1001).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.stop()), (None, &[][..]));
    for error in [tokenizer.encode("a", SpecialTokens::AreText), tokenizer.document("")] {
        let error = error.unwrap_err().to_string();
        let expected = "tokenizer.json: eos_token of each text is token 1001 (\"</s>\"), which is none of the model, \
                        whose vocabulary has 1001";
        assert!(error.ends_with(expected), "{error}");
    }
    assert_eq!(tokenizer.prompt("a").unwrap().len(), 2);
    let template =
        ChatTemplate::new("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [("a", "a")]).unwrap();
    template.encode(&tokenizer, &[Message::new("user", "a"), Message::new("assistant", "b")]).unwrap();
}

/// Files that are no tokenizer of Hugging Face's, and ids that are no tokens.
#[test]
fn what_is_no_tokenizer_is_an_error() {
    // As in Llama 2.
    let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let normalizer = json!({ "type": "Sequence", "normalizers": [prepend, spaces] });
    open(&json!({ "tokenizer.json": { "normalizer": normalizer } })).unwrap();

    let empty = tempfile::tempdir().unwrap();
    let error = || Tokenizer::from_folder(empty.path()).unwrap_err().to_string();
    assert!(error().ends_with("has neither tokenizer.json nor tokenizer.model"), "{}", error());
    fs::write(empty.path().join("tokenizer.model"), b"\n\x0e\n\x05<unk>\x15\x00\x00\x80\xbf\x18\x02").unwrap();
    assert!(error().contains("looks like SentencePiece's: use the checkpoint's tokenizer.json"), "{}", error());
    let error = Tokenizer::open("nowhere/tokenizer.json").unwrap_err();
    assert_eq!(error.to_string(), "cannot read nowhere/tokenizer.json");
    let error = open(&json!({})).unwrap().decode(&[0, 1001]).unwrap_err();
    assert_eq!(error.to_string(), "1001 is no token: the tokenizer has ids below 1001");
    // Only some texts show the problem.
    let normalizer = json!({ "type": "Replace", "pattern": { "Regex": "a*" }, "content": "b" });
    if let Ok(tokenizer) = open(&json!({ "tokenizer.json": { "normalizer": normalizer } })) {
        for text in ["aaa", "xa", "\u{e9}a\u{e9}"] {
            let ids = tokenizer.encode(text, SpecialTokens::AreText);
            assert!(ids.is_ok() || ids.unwrap_err().to_string().starts_with("cannot tokenize"));
        }
    }
}

/// Truncation and padding in a file are its author's settings, not ours.
#[test]
fn nothing_is_cut_or_padded() {
    let truncation = json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
    let tokenizer = open(&json!({"tokenizer.json": {"truncation": truncation}})).unwrap();
    assert!(tokenizer.encode("one two three four five six", SpecialTokens::AreText).unwrap().len() > 4);
}

/// Decoders such as Llama 2's remove the first space of a text. An answer does not begin the text.
#[test]
fn an_answer_keeps_its_first_space() {
    let vocabulary = ["<unk>", "<s>", "\u{2581}", "\u{2581}cat", "\u{2581}dog", "s"];
    let vocabulary: serde_json::Map<_, _> =
        vocabulary.into_iter().zip(0..).map(|(token, id)| (token.into(), id.into())).collect();
    let replace = |pattern, content| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let token = json!({ "id": 1, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false });
    let file = json!({
        "pre_tokenizer": null, "post_processor": null, "added_tokens": [token], "normalizer": replace(" ", "\u{2581}"),
        "decoder": { "type": "Sequence", "decoders": [replace("\u{2581}", " "), { "type": "Fuse" }, strip] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>" },
    });
    let tokenizer = open(&json!({"tokenizer.json": file})).unwrap();
    let answer = [4, 5, 3];
    assert_eq!(tokenizer.stream_text().read(&answer).unwrap(), "dogs cat");
    // At the beginning of the text the decoder removes the space.
    for (prompt, space) in [(&[1, 3][..], " "), (&[3, 4], " "), (&[1, 3, 1], " "), (&[], ""), (&[1], "")] {
        let text = tokenizer.stream_text_after(prompt).unwrap().read(&answer).unwrap();
        assert_eq!(text, format!("{space}dogs cat"), "{prompt:?}");
    }
    assert_eq!(Tokenizer::bytes().stream_text_after(&[97, 98]).unwrap().read(&[32, 99]).unwrap(), " c");
}
