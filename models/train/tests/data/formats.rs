//! Text, JSON Lines and messages: which documents are read, and which line an error names.

use train::{ChatTemplate, DataSource, Format, Message, Packing, Sequence, SequenceShape, SpecialTokens, Tokenizer};

use crate::{Files, by_default, documents, epoch, folder_with_tokenizer, message, stream, wrapped};

#[test]
fn a_text_file_is_a_document() {
    let files = Files::new([("b.txt", "second"), ("a.md", "first \u{e9}"), ("c/d", "third")]);
    let dataset = files.all();
    assert_eq!(stream(&dataset), (documents(["first \u{e9}", "second", "third"]), vec![0, 9, 16]));
    assert_eq!((dataset.size().files, dataset.size().skipped), (3, 0));
}

#[test]
fn paths_are_read_in_the_order_given() {
    let files = Files::new([("b", "second"), ("a", "first")]);
    let source = DataSource::new([files.path("b"), files.path("a")]);
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["second", "first"]));
}

/// A large file is read in pieces.
#[test]
fn a_large_file_is_a_document() {
    let text = "one line\nand another \u{e9}\n".repeat(100_000);
    let files = Files::new([("large.txt", &text), ("line.jsonl", &serde_json::json!({ "text": text }).to_string())]);
    for name in ["large.txt", "line.jsonl"] {
        let (tokens, starts) = stream(&files.open(&[files.source(name)], 0.0).unwrap());
        assert!(tokens == documents([&text]), "{name} has other tokens");
        assert_eq!(starts, [0]);
    }
}

#[test]
fn a_line_is_a_document() {
    let text = "{\"text\": \"one\"}\n\n  \r\n{\"id\": 3, \"text\": \"two\"}\r\n{\"text\": \"three\"}";
    let files = Files::new([("a.jsonl", text), ("b.ndjson", text)]);
    let expected = documents(["one", "two", "three", "one", "two", "three"]);
    assert_eq!(stream(&files.all()).0, expected);
    let files = Files::new([("a.json", "{\"body\": \"one\"}\n")]);
    let source = DataSource { field: "body".into(), format: Some(Format::Jsonl), ..files.source("a.json") };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["one"]));
}

/// More documents than fit into a batch keep their order.
#[test]
fn many_lines_keep_their_order() {
    let texts: Vec<String> = (0..20_000).map(|i| format!("line {i}")).collect();
    let lines: String = texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    let (tokens, starts) = stream(&Files::new([("a.jsonl", lines)]).all());
    assert!(tokens == documents(&texts));
    assert_eq!(starts.len(), texts.len());
}

#[test]
fn a_bad_line_is_named() {
    let good = "{\"text\": \"good\"}\n";
    for (bad, expected) in [
        (&b"{\"text\": \"cut"[..], "not valid JSON: EOF while parsing a string at column 13"),
        (b"[1]", "expected an object, found a list"),
        (b"{\"body\": \"x\", \"id\": 1}", "neither `text` nor `messages`: there are `body`, `id`; `field` names"),
        (b"{}", "there are no fields"),
        (b"{\"text\": 1}", "`text` is a number, expected text"),
        (b"{\"text\": null}", "`text` is null, expected text"),
        (b"{\"messages\": \"hi\"}", "`messages` is a string, expected a list"),
        (b"{\"messages\": [{\"content\": \"hi\"}]}", "message 0 has no `role`: there are `content`"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}", "`messages` need a chat template"),
        (b"{\"text\": \"\xff\"}", "not valid UTF-8 at byte 10 of the line"),
    ] {
        let content = [good.repeat(2).as_bytes(), b"\n", bad, b"\n", good.as_bytes(), b"not JSON"].concat();
        let files = Files::new([("dir/a.jsonl", content)]);
        let error = files.error();
        let place = format!("{}:4: ", files.path("dir/a.jsonl").display());
        assert!(error.starts_with(&place) && error.contains(expected), "{error}");
    }
}

#[test]
fn a_line_too_long_for_memory_is_named() {
    let files = Files::new([("a.jsonl", vec![b' '; (64 << 20) + 1])]);
    let error = files.error();
    assert!(error.ends_with("a.jsonl:1: longer than 67108864 bytes"), "{error}");
    let element = [&b"[{\"text\": \"short\"},\n\n{\"text\": \""[..], &vec![b'x'; 64 << 20]].concat();
    let error = Files::new([("a.json", element)]).error();
    assert!(error.ends_with("a.json:3: longer than 67108864 bytes"), "{error}");
}

#[test]
fn nothing_is_there() {
    let files = Files::new([("empty", &b""[..]), ("binary", b"a\0b"), ("latin1", b"caf\xe9")]);
    let error = files.error();
    let expected = "(left out: 1 empty, 2 binary or not UTF-8)";
    assert!(error.starts_with("no text in ") && error.ends_with(expected), "{error}");
    let error = files.error_of(&[files.source("missing")]);
    assert!(error.starts_with("cannot read ") && error.contains("missing: "), "{error}");
    assert_eq!(files.error_of(&[]), "no data: give files or folders to train on");
    let error = message(&files.open(&files.sources(), 1.0).unwrap_err());
    assert_eq!(error, "held_out_fraction = 1: must be at least 0 and below 1");
}

#[test]
fn a_format_that_is_not_compiled_in_is_an_error() {
    let files = Files::new([("a.parquet", "PAR1")]);
    let error = files.error();
    let expected = match cfg!(feature = "parquet") {
        true => "is no Parquet file that can be read",
        false => "this build does not read Parquet files: build it with the cargo feature `parquet`",
    };
    assert!(error.contains("a.parquet") && error.contains(expected), "{error}");
}

#[test]
fn too_little_text() {
    let files = Files::new([("a", "four")]);
    let dataset = files.all();
    assert!(dataset.train(wrapped(4), 0).is_ok());
    let error = message(&dataset.train(wrapped(5), 0).unwrap_err());
    assert!(error.contains("the training split has 5 tokens, which make 0 sequences of 5 targets"), "{error}");
    let shape = SequenceShape { batch_size: 3, ..wrapped(1) };
    assert!(dataset.train(shape, 0).is_ok());
    let shape = SequenceShape { batch_size: 5, ..shape };
    let error = message(&dataset.train(shape, 0).unwrap_err());
    assert!(error.contains("which make 4 sequences of 1 targets; one batch needs 5"), "{error}");
    let error = message(&dataset.held_out(wrapped(1), 1).unwrap_err());
    assert!(error.contains("the held-out split has 0 tokens"), "{error}");
    for (name, shape) in [("seq_len", wrapped(0)), ("batch_size", SequenceShape { batch_size: 0, ..wrapped(1) })] {
        let error = message(&dataset.train(shape, 0).unwrap_err());
        assert_eq!(error, format!("{name} = 0: must be between 1 and 2^31 - 1"));
    }
}

/// An array gives the same documents as lines of its elements, and errors name their lines.
#[test]
fn an_array_of_objects_is_read_as_lines_are() {
    let array = "\u{feff}\n[{\"text\": \"one]}\\\"\"},\n\n  {\"id\": [1, {}],\r\n \"text\": \"two\"} ,{\"text\": \"three\"}\n]\n";
    let expected = documents(["one]}\"", "two", "three"]);
    let files = Files::new([
        ("a.json", array),
        ("b.json", "{\"text\": \"one]}\\\"\"}\n{\"text\": \"two\"}\n{\"text\": \"three\"}"),
    ]);
    for name in ["a.json", "b.json"] {
        assert_eq!(stream(&files.open(&[files.source(name)], 0.0).unwrap()).0, expected);
    }
    // `max_bytes` takes whole elements.
    let source = DataSource { max_bytes: Some(60), ..files.source("a.json") };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["one]}\""]));
    for (bad, expected) in [
        ("[{\"text\": \"one\"},\n\n{\"body\": 1}]", "a.json:3: neither `text` nor `messages`"),
        ("[{\"text\": \"one\"},\n[2]]", "a.json:2: expected an object, found a list"),
        ("[{\"text\": \"one\"},\n{\"text\": two}]", "a.json:2: not valid JSON: expected ident at column 11"),
        ("[{\"text\": \"one\"},\n{\"text\": \"two\"}", "a.json:2: the file ends before the JSON array does"),
        ("[{\"text\": \"one\"},\n{\"text\": \"two\"}]\n\n{}", "a.json:4: expected one JSON array and nothing else"),
        (
            "{\n\"text\": \"one\"}",
            "a.json begins with no whole JSON object, in an array or on a line of its own: set data.format",
        ),
        ("[1, 2]", "a.json begins with no whole JSON object"),
        ("[]", "a.json begins with no whole JSON object"),
    ] {
        let files = Files::new([("a.json", bad)]);
        let error = files.error_of(&[files.source("a.json")]);
        assert!(error.contains(expected), "{bad}: {error}");
    }
}

/// Training on the separators of a table is rarely wanted.
#[test]
fn a_table_is_refused_unless_it_is_asked_for_as_text() {
    let files = Files::new([("a.csv", "text,label\none,1\n"), ("b.TSV", "text\tlabel\n")]);
    for name in ["a.csv", "b.TSV"] {
        let error = files.error_of(&[files.source(name)]);
        assert!(error.contains(name) && error.contains("is a table, and tables are not read"), "{error}");
    }
    let source = DataSource { format: Some(Format::Text), ..files.source("a.csv") };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["text,label\none,1\n"]));
    let error = files.error();
    assert!(error.contains("(left out: 2 csv): data.field names"), "{error}");
}

/// If the extension does not decide, the first bytes do.
#[test]
fn what_is_compressed_is_refused() {
    for (begin, by) in
        [(&b"\x1f\x8b"[..], "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")]
    {
        let files = Files::new([("a.jsonl.x", begin)]);
        let error = files.error_of(&[files.source("a.jsonl.x")]);
        assert!(error.ends_with(&format!("a.jsonl.x is compressed with {by}: decompress it first")), "{error}");
        assert!(files.error().ends_with("(left out: 1 compressed)"), "{}", files.error());
    }
    for (content, reason) in [(&b""[..], "empty"), (b"caf\xe9", "binary or not UTF-8"), (b"a\0", "binary or not UTF-8")]
    {
        let files = Files::new([("a.txt", content)]);
        let error = files.error_of(&[files.source("a.txt")]);
        assert!(error.ends_with(&format!("(left out: 1 {reason})")), "{error}");
    }
}

/// Templates print nothing for missing content, and print other types in different ways.
#[test]
fn a_turn_without_content_is_named() {
    let good = conversation(&[("user", "hi"), ("assistant", "yo")]);
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    for (bad, expected) in [
        (
            r#"[{"role": "user", "text": "hi"}, {"role": "assistant", "content": "yo"}]"#,
            "message 0 (user) has neither `content` nor `tool_calls`: there are `role`, `text`",
        ),
        (
            r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "content": null}]"#,
            "message 1 (assistant) has neither",
        ),
        (
            r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]"#,
            "message 1 (assistant) has neither",
        ),
        (
            r#"[{"role": "user", "content": []}, {"role": "assistant", "content": "yo"}]"#,
            "`content` of message 0 (user) is an empty list, expected text or a list of parts",
        ),
        (
            r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "content": {"a": 1}}]"#,
            "`content` of message 1 (assistant) is an object",
        ),
        (
            r#"[{"role": "system", "content": 5}, {"role": "assistant", "content": "yo"}]"#,
            "`content` of message 0 (system) is a number or a boolean",
        ),
        (r#"[{"from": "human", "value": "hi"}]"#, "message 0 has no `role`: there are `from`, `value`"),
        (r#"[{"role": 1, "content": "hi"}]"#, "`messages[0].role` is a number, expected text"),
        (r#"["hi"]"#, "`messages[0]` is a string, expected an object"),
        (
            r#"[{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yo"}]"#,
            "the conversation has nothing that the assistant says; its roles are `gpt`, `human`",
        ),
    ] {
        let line = format!("{{\"messages\": {bad}}}");
        let files = Files::new([("chat.jsonl", [&*good, &*line].join("\n"))]);
        let error = files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(&template)).unwrap_err();
        let error = message(&error);
        assert!(error.starts_with(&format!("{}:2: {expected}", files.path("chat.jsonl").display())), "{error}");
    }
    let said_nothing = conversation(&[("user", ""), ("assistant", "yo")]);
    let files = Files::new([("chat.jsonl", said_nothing)]);
    assert!(files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(&template)).is_ok());
}

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

fn conversation(pairs: &[(&str, &str)]) -> String {
    let messages: Vec<_> = pairs.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    serde_json::json!({ "messages": messages }).to_string()
}

/// The loss counts the assistant's text and nothing else.
#[test]
fn only_what_the_assistant_says_counts() {
    let lines = [
        conversation(&[("user", "2+2?"), ("assistant", "four"), ("user", "ok"), ("assistant", "bye")]),
        conversation(&[("user", "hi"), ("assistant", "hello")]),
    ];
    let files = Files::new([("chat.jsonl", lines.join("\n"))]);
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    let tokenizer = Tokenizer::bytes();
    let dataset = files.open_with(&files.sources(), 0.0, &tokenizer, Some(&template)).unwrap();
    // Documents stay whole by default.
    let sequences = epoch(&dataset, by_default(60)).unwrap();
    assert_eq!(sequences.len(), 2);
    let said: Vec<(String, String)> = sequences
        .iter()
        .map(|sequence| {
            let mask = sequence.loss_mask.as_ref().unwrap();
            assert_eq!((mask.len(), sequence.tokens.len()), (60, 61));
            let targets = sequence.tokens[1..].iter().zip(mask);
            let counted: Vec<u32> = targets.filter(|(_, counts)| **counts).map(|(token, _)| *token).collect();
            let text = tokenizer.decode(&sequence.tokens[..sequence.num_tokens]).unwrap();
            (text, tokenizer.decode(&counted).unwrap())
        })
        .collect();
    let first = "<user>2+2?\n<assistant>four\n<user>ok\n<assistant>bye\n";
    assert!(said.contains(&(first.into(), "four\nbye\n".into())), "{said:?}");
    assert!(said.contains(&("<user>hi\n<assistant>hello\n".into(), "hello\n".into())), "{said:?}");
    // Windows of the stream have the same mask.
    let shape = SequenceShape { packing: Some(Packing::Wrapped), ..by_default(7) };
    let wrapped = epoch(&dataset, shape).unwrap();
    let counted: usize = wrapped.iter().map(|s| s.loss_mask.as_ref().unwrap().iter().filter(|c| **c).count()).sum();
    assert_eq!(counted, "four\nbye\nhello\n".len());
}

#[test]
fn tools_of_a_conversation_reach_its_template() {
    let plain = conversation(&[("user", "1+1?"), ("assistant", "2")]);
    let with_tools = plain.replacen('{', "{\"tools\": [{\"name\": \"add\"}], ", 1);
    let as_text = plain.replacen('{', r#"{"tools": "[{\"name\": \"add\"}]", "#, 1);
    let without = plain.replacen('{', r#"{"tools": " ", "#, 1);
    let each_as_text = plain.replacen('{', r#"{"tools": ["{\"name\": \"add\"}"], "#, 1);
    let files = Files::new([("chat.jsonl", [plain, with_tools, as_text, each_as_text, without].join("\n"))]);
    let source = format!("{{% for tool in tools or [] %}}[{{{{ tool.name }}}}]{{% endfor %}}{TEMPLATE}");
    let template = ChatTemplate::new(&source, [("", ""); 0]).unwrap();
    let tokenizer = Tokenizer::bytes();
    let dataset = files.open_with(&files.sources(), 0.0, &tokenizer, Some(&template)).unwrap();
    let text = |sequence: &Sequence| tokenizer.decode(&sequence.tokens[..sequence.num_tokens]).unwrap();
    let mut texts: Vec<_> = epoch(&dataset, by_default(40)).unwrap().iter().map(text).collect();
    texts.sort();
    let (plain, with_tools) = ("<user>1+1?\n<assistant>2\n", "[add]<user>1+1?\n<assistant>2\n");
    assert_eq!(texts, [plain, plain, with_tools, with_tools, with_tools]);
    for (tools, expected) in [
        (r#""[{""#, "a.jsonl:1: `tools` is text that is no JSON: EOF while parsing"),
        (r#""{}""#, "a.jsonl:1: `tools` is an object, expected a list"),
        ("3", "a.jsonl:1: `tools` is a number, expected a list"),
        (r#"[{}, 3]"#, "a.jsonl:1: `tools[1]` is a number, expected an object"),
        (r#"["{", {}]"#, "a.jsonl:1: `tools[0]` is text that is no JSON: EOF while parsing"),
    ] {
        let line = format!("{{\"tools\": {tools}, \"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}]}}");
        let files = Files::new([("a.jsonl", line)]);
        let error = files.open_with(&files.sources(), 0.0, &tokenizer, Some(&template)).unwrap_err();
        assert!(message(&error).contains(expected), "{error}");
    }
}

/// The cache has tokens for a tokenizer without this limit.
#[test]
fn a_token_that_the_model_does_not_have_is_named() {
    let files = Files::new([("a.jsonl", "{\"text\": \"b\"}\n{\"text\": \"abc\"}\n")]);
    let tokenizer = folder_with_tokenizer();
    let longest = tokenizer.encode("abc", SpecialTokens::AreText).unwrap().into_iter().max().unwrap();
    let open = |tokenizer: &Tokenizer| files.open_with(&files.sources(), 0.0, tokenizer, None);
    open(&tokenizer).unwrap();
    let limited = tokenizer.for_vocabulary(longest as usize).unwrap();
    let error = message(&open(&limited).unwrap_err());
    let expected = format!("a.jsonl:2: token {longest} (");
    assert!(
        error.contains(&expected) && error.ends_with(&format!("is none of the model, whose vocabulary has {longest}")),
        "{error}"
    );
}

/// Variables of a row override the template's.
#[test]
fn variables_of_a_conversation_reach_its_template() {
    let row =
        |beside: &str| conversation(&[("user", "q"), ("assistant", "a")]).replacen('{', &format!("{{{beside}"), 1);
    let rows = [
        row(""),
        row(r#""chat_template_kwargs": {"enable_thinking": false}, "#),
        row(r#""chat_template_kwargs": "{\"enable_thinking\": true, \"x\": 7}", "#),
        row(r#""chat_template_kwargs": null, "enable_thinking": false, "#),
    ];
    let files = Files::new([("chat.jsonl", rows.join("\n"))]);
    let source =
        format!("{{% if enable_thinking is defined and not enable_thinking %}}off{{% endif %}}{{{{ x }}}}{TEMPLATE}");
    let template = ChatTemplate::new(&source, [("x", "1")]).unwrap();
    let tokenizer = Tokenizer::bytes();
    let dataset = files.open_with(&files.sources(), 0.0, &tokenizer, Some(&template)).unwrap();
    let text = |sequence: &Sequence| tokenizer.decode(&sequence.tokens[..sequence.num_tokens]).unwrap();
    let mut begins: Vec<_> = epoch(&dataset, by_default(25)).unwrap().iter().map(text).collect();
    begins.iter_mut().for_each(|text| text.truncate(text.find('<').unwrap()));
    begins.sort();
    assert_eq!(begins, ["1", "7", "off1", "off1"]);
    for (beside, expected) in [
        (r#""chat_template_kwargs": {"tools": []}, "#, "`tools` in `chat_template_kwargs` is not for others to set"),
        (r#""chat_template_kwargs": [], "#, "`chat_template_kwargs` is a list, expected an object"),
        (r#""chat_template_kwargs": "{", "#, "`chat_template_kwargs` is text that is no JSON"),
        (r#""enable_thinking": "no", "#, "`enable_thinking` is a string, expected a boolean"),
    ] {
        let files = Files::new([("a.jsonl", row(beside))]);
        let error = files.open_with(&files.sources(), 0.0, &tokenizer, Some(&template)).unwrap_err();
        assert!(message(&error).contains(&format!("a.jsonl:1: {expected}")), "{}", message(&error));
    }
}

/// Text next to messages counts completely, before and after the first conversation.
#[test]
fn text_beside_messages_counts() {
    let lines = [
        "{\"text\": \"before\"}".into(),
        conversation(&[("user", "hi"), ("assistant", "yo")]),
        "{\"text\": \"after\"}".into(),
    ];
    let files = Files::new([("chat.jsonl", lines.join("\n"))]);
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    let dataset = files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(&template)).unwrap();
    let tokens = dataset.size().train_tokens as usize;
    let sequence = &epoch(&dataset, wrapped(tokens - 1)).unwrap()[0];
    let mask = sequence.loss_mask.as_ref().unwrap();
    let counted: Vec<u32> = (0..tokens - 1).filter(|t| mask[*t]).map(|t| sequence.tokens[t + 1]).collect();
    let expected = Tokenizer::bytes().encode("beforeyo\n", SpecialTokens::AreText).unwrap();
    assert_eq!(counted, [expected, documents(["after"])].concat());
}

#[test]
fn a_conversation_that_the_template_refuses_is_named() {
    let line = conversation(&[("user", "hi")]);
    let files = Files::new([("chat.jsonl", format!("\n{line}\n"))]);
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    let error = files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(&template)).unwrap_err();
    assert!(message(&error).contains("chat.jsonl:2: the conversation has nothing that the assistant says"), "{error}");
}

/// A source as written in a TOML config.
#[test]
fn a_source_is_a_section_of_a_config() {
    let source: DataSource = toml::from_str("paths = ['a', 'b']\nformat = 'jsonl'\nweight = 0.5").unwrap();
    let expected = DataSource { format: Some(Format::Jsonl), weight: Some(0.5), ..DataSource::new(["a", "b"]) };
    assert_eq!(source, expected);
    assert_eq!(source.field, "text");
    assert!(toml::from_str::<DataSource>("path = 'a'").unwrap_err().to_string().contains("unknown field `path`"));
    assert!(toml::from_str::<DataSource>("paths = []\nformat = 'csv'").is_err());
    assert_eq!(toml::from_str::<DataSource>(&toml::to_string(&source).unwrap()).unwrap(), source);
}
