//! Text, JSON and messages: which documents are read, and how an error names its place.

use crate::*;

/// A large text is read in chunks, and more documents than fit into a batch keep their order.
#[test]
fn large_files() {
    let text = "one line\nand another \u{e9}\n".repeat(100_000);
    let texts: Vec<String> = (0..20_000).map(|i| format!("line {i}")).collect();
    let files = Files::new([("large.txt", &text), ("line.jsonl", &lines([&text])), ("lines.jsonl", &lines(&texts))]);
    for (name, expected) in
        [("large.txt", documents([&text])), ("line.jsonl", documents([&text])), ("lines.jsonl", documents(&texts))]
    {
        assert!(files.tokens(files.source(name)) == expected, "{name} has other tokens");
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(vec![], flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

/// gzip and zstd are decompressed while text and JSON are read. What a file holds is found without
/// their extension, and a file that ends too early is an error.
#[test]
fn compressed_files() {
    let text = "a line of text\n".repeat(30_000);
    let lines = lines(["one", &text]);
    let array = format!("[{}\n]", lines.trim_end().replacen('\n', ",\n", 1));
    for compress in [gzip, zstd] {
        // Two members or frames are one file. The bytes of the text count for `max_bytes`.
        let halves = [compress(&text.as_bytes()[..100]), compress(&text.as_bytes()[100..])].concat();
        for (name, content, whole, max_bytes, cut) in [
            ("a.txt.x", halves, documents([&text]), 100_000, documents([&text[..100_000]])),
            ("b.jsonl.x", compress(lines.as_bytes()), documents(["one", &text]), 100, documents(["one"])),
            ("c.json.x", compress(array.as_bytes()), documents(["one", &text]), 100, documents(["one"])),
            ("d.json.x", compress(lines.as_bytes()), documents(["one", &text]), 100, documents(["one"])),
        ] {
            let files = Files::new([(name, &content)]);
            let source = DataSource { max_bytes: Some(max_bytes), ..files.source(name) };
            assert!(files.tokens(files.source(name)) == whole && files.tokens(source) == cut, "{name}");
            for len in [content.len() - 1, content.len() / 2, 8] {
                files.write("cut", &content[..len]);
                let error = files.error_of_file("cut");
                assert!(error.contains("cannot read ") && error.contains("cut: "), "{name}, {len} bytes: {error}");
            }
        }
        // Parquet is read from its end, so it has to be decompressed first.
        let error = Files::new([("a.parquet.x", compress(b"PAR1"))]).error_of_file("a.parquet.x");
        assert!(error.contains("a.parquet.x is compressed with "), "{error}");
    }
}

fn conversation(pairs: &[(&str, &str)]) -> String {
    let messages: Vec<_> = pairs.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    json!({ "messages": messages }).to_string()
}

/// Files that cannot be read, as characters for bytes, with the error of naming them.
#[test]
fn what_is_wrong_is_named() {
    let template = template("");
    for (name, content, expected) in table::<(String, String, String)>("refusals/data") {
        let bytes: Vec<u8> = content.chars().map(|byte| u8::try_from(byte).unwrap()).collect();
        let files = Files::new([(&name, bytes)]);
        let opened = files.open_with(&[files.source(&name)], 0.0, &Tokenizer::bytes(), Some(&template));
        let error = message(&opened.and_then(|dataset| epoch(&dataset, wrapped(2))).unwrap_err());
        assert!(error.contains(&expected), "{expected}: {error}");
    }
    let chat = conversation(&[("user", "hi"), ("assistant", "yo")]);
    let error = Files::new([("chat.jsonl", chat)]).error();
    assert!(error.ends_with(
        "chat.jsonl:1: `messages` need a chat template: set data.chat_template, or use a tokenizer that has one"
    ));
    let parquet = match cfg!(feature = "parquet") {
        true => "a.parquet cannot be read as Parquet",
        false => "a.parquet: this build does not read Parquet files: build it with the cargo feature `parquet`",
    };
    let error = Files::new([("a.parquet", "PAR1")]).error();
    assert!(error.contains(parquet), "{error}");
    let files = Files::new([("a.csv", "text,label\none,1\n")]);
    let source = DataSource { format: Some(Format::Text), ..files.source("a.csv") };
    assert_eq!(files.tokens(source), documents(["text,label\none,1\n"]));
    let error = files.error();
    assert!(error.starts_with("no text in ") && error.contains("1 csv): data.field names"), "{error}");
    let error = files.error_of(&[files.source("missing")]);
    assert!(error.starts_with("cannot read ") && error.contains("missing: "), "{error}");
    assert_eq!(files.error_of(&[]), "no data: give files or folders to train on");
    let error = message(&files.open(&files.sources(), 1.0).unwrap_err());
    assert_eq!(error, "validation_split = 1: must be at least 0 and below 1");
    // Documents are held in memory.
    let long = [&b"[{\"text\": \"short\"},\n\n{\"text\": \""[..], &vec![b'x'; 64 << 20]].concat();
    for (name, content, line) in [("a.jsonl", vec![b' '; (64 << 20) + 1], 1), ("a.json", long, 3)] {
        let error = Files::new([(name, content)]).error();
        assert!(error.ends_with(&format!("{name}:{line}: longer than 67108864 bytes")), "{error}");
    }
}

#[test]
fn too_little_text() {
    let dataset = Files::new([("a", "four")]).all();
    assert!(dataset.train(wrapped(4), 0).is_ok());
    for (batch_size, seq_len, expected) in [
        (1, 5, "the training split has 5 tokens, which make 0 sequences of 5 targets"),
        (5, 1, "which make 4 sequences of 1 targets; one batch needs 5"),
        (1, 0, "seq_len = 0: must be between 1 and 2^31 - 1"),
        (0, 1, "batch_size = 0: must be between 1 and 2^31 - 1"),
    ] {
        let error = dataset.train(SequenceShape { batch_size, ..wrapped(seq_len) }, 0).unwrap_err();
        assert!(message(&error).contains(expected), "{error}");
    }
    let error = message(&dataset.held_out(wrapped(1), 1).unwrap_err());
    assert!(error.contains("the validation split has 0 tokens"), "{error}");
}

/// Opens lines of conversations as bytes.
fn chats(lines: &[String], template: &ChatTemplate) -> anyhow::Result<Dataset> {
    let files = Files::new([("chat.jsonl", lines.join("\n"))]);
    files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(template))
}

/// Texts of the sequences, sorted.
fn texts(dataset: &Dataset, seq_len: usize) -> Vec<String> {
    let text = |sequence: &Sequence| Tokenizer::bytes().decode(&sequence.tokens[..sequence.num_tokens]).unwrap();
    let mut texts: Vec<_> = epoch(dataset, by_default(seq_len)).unwrap().iter().map(text).collect();
    texts.sort();
    texts
}

/// The loss counts the assistant's text and nothing else, in whole documents, as by default, and in
/// windows. Text next to messages counts completely.
#[test]
fn only_what_the_assistant_says_counts() {
    let first = conversation(&[("user", "2+2?"), ("assistant", "four"), ("user", "ok"), ("assistant", "bye")]);
    let second = conversation(&[("user", "hi"), ("assistant", "hello")]);
    let expected = ["<user>2+2?\n<assistant>four\n<user>ok\n<assistant>bye\n", "<user>hi\n<assistant>hello\n"];
    let said = [first.clone(), second];
    assert_eq!(texts(&chats(&said, &template("")).unwrap(), 60), expected);
    let with_text = [lines(["before"]).trim_end().into(), first, lines(["after"])];
    let (answers, all) = (documents(["four\nbye\nhello\n"]).split_off(1), documents(["beforefour\nbye\n", "after"]));
    for (rows, shape, mut expected) in [
        (&said[..], Some(by_default(60)), answers.clone()),
        (&said, Some(wrapped(7)), answers),
        (&with_text, None, all[1..].to_vec()),
    ] {
        let dataset = chats(rows, &template("")).unwrap();
        let shape = shape.unwrap_or_else(|| wrapped(dataset.size().train_tokens as usize - 1));
        let mut counted = vec![];
        for sequence in epoch(&dataset, shape).unwrap() {
            let mask = sequence.loss_mask.unwrap();
            assert_eq!(mask.len() + 1, sequence.tokens.len());
            counted.extend((0..mask.len()).filter(|t| mask[*t]).map(|t| sequence.tokens[t + 1]));
        }
        counted.sort_unstable();
        expected.sort_unstable();
        assert_eq!(counted, expected);
    }
}

/// Tools and variables of a row, as values or as JSON text, override the template's.
#[test]
fn fields_of_a_conversation_reach_its_template() {
    let row =
        |fields: &str| conversation(&[("user", "q"), ("assistant", "a")]).replacen('{', &format!("{{{fields}"), 1);
    let rows = [
        r#""#,
        r#""tools": [{"name": "add"}], "#,
        r#""tools": "[{\"name\": \"add\"}]", "#,
        r#""tools": ["{\"name\": \"add\"}"], "#,
        r#""tools": " ", "#,
        r#""chat_template_kwargs": {"enable_thinking": false}, "#,
        r#""chat_template_kwargs": "{\"enable_thinking\": true, \"x\": 7}", "#,
        r#""chat_template_kwargs": null, "enable_thinking": false, "#,
    ]
    .map(row);
    let source = format!(
        "{{% for tool in tools or [] %}}[{{{{ tool.name }}}}]{{% endfor %}}\
         {{% if enable_thinking is defined and not enable_thinking %}}off{{% endif %}}{{{{ x }}}}{TEMPLATE}"
    );
    let template = ChatTemplate::new(&source, [("x", "1")]).unwrap();
    let mut begins = texts(&chats(&rows, &template).unwrap(), 32);
    begins.iter_mut().for_each(|text| text.truncate(text.find('<').unwrap()));
    assert_eq!(begins, ["1", "1", "7", "[add]1", "[add]1", "[add]1", "off1", "off1"]);
}

/// The cache has tokens for a tokenizer without this limit.
#[test]
fn a_token_that_the_model_does_not_have_is_named() {
    let files = Files::new([("a.jsonl", "{\"text\": \"b\"}\n{\"text\": \"abc\"}\n")]);
    let tokenizer = folder_with_tokenizer();
    let longest = tokenizer.encode("abc", SpecialTokens::AreText).unwrap().into_iter().max().unwrap();
    let open = |tokenizer: &Tokenizer| files.open_with(&files.sources(), 0.0, tokenizer, None);
    open(&tokenizer).unwrap();
    let error = message(&open(&tokenizer.for_vocabulary(longest as usize).unwrap()).unwrap_err());
    let end = format!("is none of the model, whose vocabulary has {longest}");
    assert!(error.contains(&format!("a.jsonl:2: token {longest} (")) && error.ends_with(&end), "{error}");
}
