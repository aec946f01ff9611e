//! Compares tokenizers with the Python originals, whose ids `vectors.py` recorded, and checks
//! errors in their files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use trainer::{ByteTokenizer, ChatTemplate, Conversation, Message, SpecialTokens, Tokenizer};

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

fn rows(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(vectors().join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Test texts. Long ones are stored as repetitions.
fn strings() -> Vec<String> {
    let text = |row: Value| match row {
        Value::String(text) => text,
        row => {
            let [repeat, then] = ["repeat", "then"].map(|key| row[key].as_str().unwrap().to_string());
            repeat.repeat(row["times"].as_u64().unwrap() as usize) + &then
        }
    };
    rows("strings.jsonl").into_iter().map(text).collect()
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
    let (strings, expected) = (strings(), rows(expected));
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
fn decodes_broken_text_like_the_original(tokenizer: &Tokenizer, rows: Vec<Value>) {
    assert!(rows.len() >= 300);
    for row in rows {
        let ids: Vec<u32> = row["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let text = row["text"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{ids:?}");
        assert_eq!(streamed(tokenizer, &ids), text, "{ids:?}");
    }
}

#[test]
fn hugging_face_gives_the_ids_of_the_original() {
    let tokenizer = Tokenizer::from_folder(vectors()).unwrap();
    equals_the_original(&tokenizer, "hf_text.jsonl", SpecialTokens::AreText);
    equals_the_original(&tokenizer, "hf_special.jsonl", SpecialTokens::InText);
    assert_ne!(rows("hf_text.jsonl"), rows("hf_special.jsonl"));
    decodes_broken_text_like_the_original(&tokenizer, rows("broken_hf.jsonl"));
}

/// Llama 3's `tokenizer.model` at the path `FLOAT8_LLAMA3_TOKENIZER`. Its licence forbids to commit
/// it.
fn llama3_file() -> Option<PathBuf> {
    let path = std::env::var_os("FLOAT8_LLAMA3_TOKENIZER").map(PathBuf::from);
    if path.is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI must set FLOAT8_LLAMA3_TOKENIZER");
        eprintln!("skipped: FLOAT8_LLAMA3_TOKENIZER names no tokenizer.model of Llama 3");
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
    equals_the_original(&tokenizer, "llama3_text.jsonl", SpecialTokens::AreText);
    equals_the_original(&tokenizer, "llama3_special.jsonl", SpecialTokens::InText);
    decodes_broken_text_like_the_original(&tokenizer, rows("broken_llama3.jsonl"));

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

#[test]
fn a_stream_ends_no_character_early() {
    let tokenizer = Tokenizer::bytes();
    let mut stream = tokenizer.stream();
    let pieces: Vec<_> = "né👩".bytes().map(|byte| stream.push(u32::from(byte)).unwrap()).collect();
    assert_eq!(pieces, ["n", "", "é", "", "", "", "👩"]);
    assert_eq!(stream.finish().unwrap(), "");
    // Bytes that can never be valid, then an incomplete character.
    let mut stream = tokenizer.stream();
    let pieces: Vec<_> = [0xf0, 0x9f, 0x41, 0xe2, 0x82].map(|id| stream.push(id).unwrap()).into();
    assert_eq!(pieces, ["", "", "\u{fffd}A", "", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

/// The full text has special tokens, the text for a reader has none.
#[test]
fn streams_keep_special_tokens_or_leave_them_out() {
    let tokenizer = Tokenizer::from_file(vectors().join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode("<|begin_of_text|>hi", SpecialTokens::InText).unwrap();
    assert_eq!(tokenizer.stream().read(&ids).unwrap(), "<|begin_of_text|>hi");
    assert_eq!(tokenizer.stream_text().read(&ids).unwrap(), "hi");
}

/// Folder with the vectors' tokenizer and these files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(vectors().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
    folder
}

#[test]
fn the_files_beside_it_say_what_begins_and_ends_a_text() {
    let marks = |files: &[(&str, &str)]| {
        let tokenizer = Tokenizer::from_folder(folder(files).path()).unwrap();
        (tokenizer.bos(), tokenizer.eos(), tokenizer.stop().to_vec(), tokenizer.document("a").unwrap().len())
    };
    let (config, generation) = ("tokenizer_config.json", "generation_config.json");
    // The template of tokenizer.json puts <|begin_of_text|> first, and has no end token.
    assert_eq!(marks(&[]), (Some(0), None, vec![], 2));
    assert_eq!(marks(&[(generation, r#"{"eos_token_id": [1, 4]}"#)]), (Some(0), Some(1), vec![1, 4], 3));
    let text = r#"{"bos_token": "<|end_header_id|>", "eos_token": {"content": "<|end_of_text|>"}}"#;
    assert_eq!(marks(&[(config, text)]), (Some(0), Some(1), vec![1], 3), "its own template decides");
    let both = [(config, text), (generation, r#"{"bos_token_id": 0, "eos_token_id": 4}"#)];
    assert_eq!(marks(&both), (Some(0), Some(1), vec![4], 3), "of texts the tokenizer's, of generation the other");
    let added = text.replacen('{', r#"{"add_bos_token": true, "#, 1);
    assert_eq!(marks(&[(config, &added)]), (Some(3), Some(1), vec![1], 3));
    // config.json decides the end, as transformers makes a generation_config.json from it.
    let model = ("config.json", r#"{"eos_token_id": [1, 6]}"#);
    assert_eq!(marks(&[model, (config, text)]), (Some(0), Some(1), vec![1, 6], 3));
    assert_eq!(marks(&[model, (generation, r#"{"eos_token_id": 4}"#)]), (Some(0), Some(4), vec![4], 3));
    assert_eq!(marks(&[model, (generation, "{}")]), (Some(0), Some(1), vec![1, 6], 3));
    let without = r#"{"add_bos_token": false, "bos_token": "<|begin_of_text|>", "eos_token": null}"#;
    assert_eq!(marks(&[(config, without)]), (None, None, vec![], 1));

    assert_eq!(marks(&[(config, r#"{"eos_token": "</s>"}"#)]), (Some(0), Some(1001), vec![1001], 3), "a new token");

    let error = |name, text| Tokenizer::from_folder(folder(&[(name, text)]).path()).unwrap_err().to_string();
    let message = error(config, r#"{"eos_token": 2}"#);
    assert!(message.ends_with("tokenizer_config.json: eos_token = 2 is not a token of this tokenizer"), "{message}");
    let message = error(generation, r#"{"eos_token_id": [1, 5000]}"#);
    assert!(message.ends_with("eos_token_id = 5000 is not a token of this tokenizer"), "{message}");
    assert!(error(generation, "{").ends_with("generation_config.json is not valid"));
}

/// Tokens that only the files next to the tokenizer list have one id each.
#[test]
fn the_files_beside_it_may_have_more_tokens() {
    let open = |files: &[(&str, &str)]| Tokenizer::from_folder(folder(files).path());
    let plain = open(&[]).unwrap();
    assert_eq!(plain.vocab_size(), 1001);
    let (config, others) = ("tokenizer_config.json", "added_tokens.json");
    let entry = |id: &str| {
        format!(
            r#"{{"added_tokens_decoder": {{"{id}": {{"content": "<|x|>", "special": true}}, "2": {{"content": "<|start_header_id|>"}}}}}}"#
        )
    };
    let ids = r#"{"<|x|>": 1001, "<y>": 1002}"#;
    let special = r#"{"additional_special_tokens": ["<|x|>", "<|eot_id|>"]}"#;
    for files in
        [&[(config, &*entry("1001"))][..], &[(others, ids)], &[(config, special)], &[(config, special), (others, ids)]]
    {
        let tokenizer = open(files).unwrap();
        assert_eq!(tokenizer.encode("<|x|>", SpecialTokens::InText).unwrap(), [1001], "{files:?}");
        assert_eq!(tokenizer.decode(&[1001]).unwrap(), "<|x|>");
        let is_special = files.iter().any(|(name, _)| *name == config);
        assert_eq!(tokenizer.encode("<|x|>", SpecialTokens::AreText).unwrap().len() > 1, is_special);
        assert_ne!(tokenizer.fingerprint(), plain.fingerprint());
    }
    // Tokens that it already has change nothing.
    let known = entry("1001").replace("1001", "4").replace("<|x|>", "<|eot_id|>");
    let same = r#"{"<|eot_id|>": 4}"#;
    assert_eq!(open(&[(config, &known), (others, same)]).unwrap().fingerprint(), plain.fingerprint());
    let error = |files: &[(&str, &str)]| open(files).unwrap_err().to_string();
    assert!(error(&[(config, &entry("1005"))]).contains("\"<|x|>\" has the id 1005, but the tokenizer gives it 1001"));
    let message = error(&[(config, &entry("3"))]);
    assert!(
        message.contains("has the id 3, but 3 is \"<|end_header_id|>\", and the tokenizer gives it 1001"),
        "{message}"
    );
    // If the newer file lists ids, the older one must agree.
    let message = error(&[(config, &known), (others, r#"{"<|x|>": 1001}"#)]);
    assert!(
        message.contains("added_tokens.json: \"<|x|>\" has the id 1001, but the tokenizer does not have it"),
        "{message}"
    );
    let message = error(&[(config, &known), (others, r#"{"<|eot_id|>": 1001}"#)]);
    assert!(message.contains("\"<|eot_id|>\" has the id 1001, but the tokenizer gives it 4"), "{message}");
    assert!(error(&[(others, r#"{"a": -1}"#)]).contains("added_tokens.json: added_tokens.json = [-1,"));
    assert!(error(&[(config, r#"{"added_tokens_decoder": {"1001": 5}}"#)]).contains("added_tokens_decoder = [1001,5]"));
}

/// Tokens with separate keys precede lists of tokens, as in transformers.
#[test]
fn special_tokens_without_ids_are_new_tokens() {
    let text = "<pad><unk><a><b>";
    let ids = |files: &[(&str, &str)]| {
        let tokenizer = Tokenizer::from_folder(folder(files).path()).unwrap();
        tokenizer.encode(text, SpecialTokens::InText).unwrap()
    };
    let (config, map) = ("tokenizer_config.json", "special_tokens_map.json");
    let all = r#"{"additional_special_tokens": ["<a>", "<b>"], "pad_token": "<pad>", "unk_token": {"content": "<unk>"},
        "mask_token": null, "sep_token": "", "eos_token": "<|eot_id|>"}"#;
    let other = r#"{"additional_special_tokens": ["<a>", "<b>"], "pad_token": "<other>"}"#;
    let added = r#"{"added_tokens_decoder": {}}"#;
    for files in [&[(config, all)][..], &[(map, all)], &[(config, other), (map, all)], &[(config, all), (map, all)]] {
        assert_eq!(ids(files), [1002, 1001, 1003, 1004], "{files:?}");
    }
    assert_eq!(ids(&[(config, added), (map, all)]), ids(&[]), "a list of ids overrides the older file");
}

/// A model may have fewer tokens than its tokenizer, as long as no text has the others.
#[test]
fn a_token_that_the_model_does_not_have_is_an_error() {
    let open = || Tokenizer::from_folder(folder(&[("added_tokens.json", r#"{"<y>": 1001}"#)]).path()).unwrap();
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
    let folder = folder(&[("tokenizer_config.json", r#"{"eos_token": "</s>"}"#)]);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap().for_vocabulary(1001).unwrap();
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

/// If nothing in the files puts BOS before a text, there is none: the rule of transformers.
#[test]
fn a_tokenizer_that_puts_nothing_first_has_no_bos() {
    let file: Value = serde_json::from_str(&fs::read_to_string(vectors().join("tokenizer.json")).unwrap()).unwrap();
    let template = file["post_processor"].clone();
    // A template that only ends a text puts no BOS before it.
    let mut ends = template.clone();
    ends["single"].as_array_mut().unwrap().reverse();
    let named = r#"{"bos_token": "<|begin_of_text|>"}"#;
    let added = named.replacen('{', r#"{"add_bos_token": true, "#, 1);
    for (post_processor, config, expected) in [
        (template, named, (Some(0), 2)),
        (Value::Null, named, (None, 1)),
        (Value::Null, &added, (Some(0), 2)),
        (ends, named, (None, 1)),
    ] {
        let text = changed("post_processor", post_processor);
        let folder = folder(&[("tokenizer.json", &text), ("tokenizer_config.json", config)]);
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        assert_eq!((tokenizer.bos(), tokenizer.prompt("a").unwrap().len()), expected);
    }
}

/// The vectors' tokenizer.json, with another value of this key.
fn changed(key: &str, value: Value) -> String {
    let mut file: Value = serde_json::from_str(&fs::read_to_string(vectors().join("tokenizer.json")).unwrap()).unwrap();
    file[key] = value;
    file.to_string()
}

/// Files that are no tokenizer, on which the library panics, aborts or allocates 4 GB, that would
/// make gigabytes from a short text, or take hours for one.
#[test]
fn what_is_no_tokenizer_is_an_error() {
    let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let sequence = |list: &str, parts: Vec<Value>| json!({ "type": "Sequence", list: parts });
    let tens = || replace(json!({ "String": "a" }), "aaaaaaaaaa");
    let charsmap = |map: &str| json!({ "type": "Precompiled", "precompiled_charsmap": map });
    let long = "z".repeat(5000);
    let token = json!({ "id": 1001, "content": long, "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false });
    let template = |ids: Value| {
        let before = json!({ "SpecialToken": { "id": "x", "type_id": 0 } });
        json!({ "type": "TemplateProcessing", "pair": [], "special_tokens": ids,
            "single": [before, { "Sequence": { "id": "A", "type_id": 0 } }] })
    };
    let many = json!({ "x": { "id": "x", "ids": vec![0; 1000], "tokens": vec!["x"; 1000] } });
    let word = json!({ "type": "WordPiece", "vocab": { "a": 0 }, "unk_token": "a", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 1_000_000 });
    let format = "is no tokenizer of Hugging Face's format";
    for (text, expected) in [
        ("".into(), format),
        ("{}".into(), format),
        ("[1]".into(), format),
        (r#"{"model": {"type": "Nonsense"}}"#.into(), format),
        // Other content in its place.
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 17208819\n".into(),
            "tokenizer.json: it is a Git LFS pointer, not the file: `git lfs pull` fetches that",
        ),
        (changed("post_processor", template(json!({}))), format),
        (changed("normalizer", charsmap("AAAA")), "precompiled_charsmap has 3 bytes"),
        (changed("normalizer", charsmap("/////w==")), "of which 4294967295 are to be its table"),
        (
            changed("normalizer", sequence("normalizers", vec![charsmap("/////w==")])),
            "of which 4294967295 are to be its table",
        ),
        (changed("normalizer", charsmap("?")), "is not base64"),
        (
            changed("normalizer", sequence("normalizers", vec![tens(); 12])),
            "its normalizer can make a text 1000000000000 times as long",
        ),
        (
            changed("decoder", sequence("decoders", vec![tens(); 4])),
            "its decoder can make a text 10000 times as long: at most 1024 times",
        ),
        (
            changed("normalizer", replace(json!({ "Regex": "" }), &"a".repeat(2000))),
            "can make a text 2001 times as long",
        ),
        (
            changed("normalizer", json!({ "type": "Prepend", "prepend": long })),
            "a text in normalizer has 5000 bytes: at most 4096",
        ),
        (changed("added_tokens", json!([token])), "a text in added_tokens has 5000 bytes"),
        (changed("post_processor", template(many)), "a list in post_processor has 1000 entries: at most 256"),
        (changed("model", word), "max_input_chars_per_word is 1000000: at most 4096"),
    ] {
        let error = Tokenizer::from_folder(folder(&[("tokenizer.json", &text)]).path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // As in Llama 2.
    let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let spaces = replace(json!({ "String": " " }), "\u{2581}");
    let text = changed("normalizer", sequence("normalizers", vec![prepend, spaces]));
    Tokenizer::from_folder(folder(&[("tokenizer.json", &text)]).path()).unwrap();

    let empty = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_folder(empty.path()).unwrap_err().to_string();
    assert!(error.ends_with("has neither tokenizer.json nor tokenizer.model"), "{error}");
    fs::write(empty.path().join("tokenizer.model"), b"\n\x0e\n\x05<unk>\x15\x00\x00\x80\xbf\x18\x02").unwrap();
    let error = Tokenizer::from_folder(empty.path()).unwrap_err().to_string();
    assert!(error.contains("looks like SentencePiece's: use the checkpoint's tokenizer.json"), "{error}");
    let error = Tokenizer::open("nowhere/tokenizer.json").unwrap_err();
    assert_eq!(error.to_string(), "cannot read nowhere/tokenizer.json");
    let error = Tokenizer::from_folder(vectors()).unwrap().decode(&[0, 1001]).unwrap_err();
    assert_eq!(error.to_string(), "1001 is no token: the tokenizer has ids below 1001");
    // Only some texts show the problem.
    let text = changed("normalizer", replace(json!({ "Regex": "a*" }), "b"));
    if let Ok(tokenizer) = Tokenizer::from_folder(folder(&[("tokenizer.json", &text)]).path()) {
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
    let folder = folder(&[("tokenizer.json", &changed("truncation", truncation))]);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert!(tokenizer.encode("one two three four five six", SpecialTokens::AreText).unwrap().len() > 4);
}

/// Decoders such as Llama 2's remove the first space of a text. An answer does not begin the text.
#[test]
fn an_answer_keeps_its_first_space() {
    let vocabulary = ["<unk>", "<s>", "\u{2581}", "\u{2581}cat", "\u{2581}dog", "s"];
    let vocabulary: serde_json::Map<_, _> =
        vocabulary.into_iter().zip(0..).map(|(token, id)| (token.into(), id.into())).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "pre_tokenizer": null, "post_processor": null,
        "added_tokens": [{ "id": 1, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false }],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>" },
    });
    let folder = folder(&[("tokenizer.json", &file.to_string())]);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let answer = [4, 5, 3];
    assert_eq!(tokenizer.stream_text().read(&answer).unwrap(), "dogs cat");
    for prompt in [&[1, 3][..], &[3, 4], &[1, 3, 1]] {
        assert_eq!(tokenizer.stream_text_after(prompt).unwrap().read(&answer).unwrap(), " dogs cat", "{prompt:?}");
    }
    // At the beginning of the text the decoder removes the space.
    for prompt in [&[][..], &[1]] {
        assert_eq!(tokenizer.stream_text_after(prompt).unwrap().read(&answer).unwrap(), "dogs cat", "{prompt:?}");
    }
    assert_eq!(Tokenizer::bytes().stream_text_after(&[97, 98]).unwrap().read(&[32, 99]).unwrap(), " c");
}
