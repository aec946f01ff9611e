//! Parquet: rows of a column of text or of messages.

use ::parquet::basic::Compression;
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use std::sync::Arc;

use crate::*;

/// Values of a column, with their definition and repetition levels.
type Column<'a> = (Vec<&'a str>, Vec<i16>, Vec<i16>);

fn parquet(schema: &str, groups: &[Vec<Column<'_>>], compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(vec![], schema, Arc::new(properties)).unwrap();
    for columns in groups {
        let mut group = writer.next_row_group().unwrap();
        for (values, definition, repetition) in columns {
            let values: Vec<ByteArray> = values.iter().map(|value| ByteArray::from(*value)).collect();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(definition), Some(repetition)).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.into_inner().unwrap()
}

fn texts<'a>(texts: &[&'a str]) -> Vec<Column<'a>> {
    let ones = vec![1; texts.len()];
    vec![(vec!["id"; texts.len()], ones.clone(), vec![0; texts.len()]), (texts.to_vec(), ones, vec![0; texts.len()])]
}

/// A file of two groups of rows.
pub fn of_texts(rows: &[impl AsRef<str>]) -> Vec<u8> {
    let rows: Vec<&str> = rows.iter().map(AsRef::as_ref).collect();
    let (first, second) = rows.split_at(rows.len() / 2);
    parquet(TEXT, &[texts(first), texts(second)], Compression::SNAPPY)
}

const TEXT: &str = "message m { optional binary id (UTF8); optional binary text (UTF8); }";

/// The text of a compressed file is larger than the file. A row without text counts as a row.
#[test]
fn all_rows_are_read_whatever_the_compression() {
    let mut rows = vec!["the same words again and again, which a compressed file holds once"; 2000];
    (rows[7], rows[1999]) = ("", "");
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::BROTLI(Default::default()),
        Compression::LZ4_RAW,
        Compression::ZSTD(Default::default()),
    ] {
        let files = Files::new([("a.parquet", parquet(TEXT, &[texts(&rows), texts(&rows[..300])], compression))]);
        let (tokens, starts) = stream(&files.all());
        assert_eq!(starts.len(), 2300, "{compression}");
        assert!(tokens == documents(rows.iter().chain(&rows[..300])), "{compression}");
        let source = DataSource { field: "id".into(), ..files.source("a.parquet") };
        assert!(files.tokens(source) == documents(["id"; 2300]), "{compression}");
        // More than the file's bytes, but less than its text.
        let source = DataSource { max_bytes: Some(100_000), ..files.source("a.parquet") };
        let taken = files.open(&[source], 0.0).unwrap().size().train_tokens;
        assert!((100_000..103_000).contains(&taken), "{compression}: {taken}");
    }
}

/// Equal conversations with tools, as lists or as JSON text, give the same tokens in both formats.
#[test]
fn all_fields_of_a_line_are_columns() {
    let schema = "message m { optional binary id (UTF8); optional binary text (UTF8);
        optional group messages (LIST) { repeated group list { optional group element {
        optional binary role (UTF8); optional binary content (UTF8); optional binary name (UTF8); } } }
        optional binary tools (UTF8); }";
    let tools = r#"[{"name": "add", "of": [1, 2]}]"#;
    // A conversation without tools, a conversation with tools, and a text.
    let levels = (vec![4, 4, 4, 4, 0], vec![0, 1, 0, 1, 0]);
    let group = vec![
        (vec!["a", "b", "c"], vec![1; 3], vec![0; 3]),
        (vec!["plain"], vec![0, 0, 1], vec![0; 3]),
        (vec!["user", "assistant", "user", "assistant"], levels.0.clone(), levels.1.clone()),
        (vec!["2+2?", "four", "1+1?", "two"], levels.0, levels.1.clone()),
        // No message has a name.
        (vec![], vec![3, 3, 3, 3, 0], levels.1),
        (vec![tools], vec![0, 1, 0], vec![0; 3]),
    ];
    let message = |content: [&str; 2]| json!([{"role": "user", "content": content[0]}, {"role": "assistant", "content": content[1]}]);
    let tools: serde_json::Value = serde_json::from_str(tools).unwrap();
    let lines = [
        json!({"id": "a", "messages": message(["2+2?", "four"])}),
        json!({"messages": message(["1+1?", "two"]), "tools": tools}),
        json!({"text": "plain", "messages": null}),
    ];
    let files = Files::new([
        ("a.parquet", parquet(schema, &[group], Compression::SNAPPY)),
        ("a.jsonl", lines.map(|line| line.to_string()).join("\n").into_bytes()),
    ]);
    let source = "{% for tool in tools or [] %}[{{ tool.name }} {{ tool.of }}]{% endfor %}{% for m in messages %}{{ m.role }}:\
                  {{ m.content }}{{ m.name }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::new(source, [("", ""); 0]).unwrap();
    let read = |name: &str| {
        let dataset = files.open_with(&[files.source(name)], 0.0, &Tokenizer::bytes(), Some(&template)).unwrap();
        let tokens = dataset.size().train_tokens as usize;
        epoch(&dataset, wrapped(tokens - 1)).unwrap().remove(0)
    };
    let rows = read("a.parquet");
    assert_eq!(rows, read("a.jsonl"));
    let text = Tokenizer::bytes().decode(&rows.tokens).unwrap();
    assert_eq!(text, "user:2+2?;assistant:four;[add [1, 2]]user:1+1?;assistant:two;plain");
}

/// A small file whose text is long.
#[test]
fn a_row_too_long_for_memory_is_named() {
    let long: &'static str = "x".repeat((64 << 20) + 1).leak();
    let files = Files::new([("a.parquet", parquet(TEXT, &[texts(&["one", long])], Compression::SNAPPY))]);
    assert!(files.error().ends_with("a.parquet, row 2: longer than 67108864 bytes"), "{}", files.error());
}

#[test]
fn a_bad_row_is_named() {
    let mut null = texts(&["one", "two"]);
    null[1] = (vec!["one"], vec![1, 0], vec![0, 0]);
    let files = Files::new([("a.parquet", parquet(TEXT, &[texts(&["zero"]), null], Compression::SNAPPY))]);
    assert!(files.error().ends_with("a.parquet, row 3: `text` is null, expected text"), "{}", files.error());
    let source = DataSource { field: "body".into(), ..files.source("a.parquet") };
    let error = files.error_of(&[source]);
    assert!(error.contains("row 1: neither `body` nor `messages`: there are `id`, `text`"), "{error}");
    let bytes = parquet(&TEXT.replace(" (UTF8)", ""), &[texts(&["one"])], Compression::SNAPPY);
    let error = Files::new([("a.parquet", bytes)]).error();
    assert!(error.contains("row 1: `text` is bytes, expected text"), "{error}");
}

/// Any damage gives an error or other rows, and the process continues.
#[test]
fn a_broken_file_is_an_error() {
    let whole = parquet(TEXT, &[texts(&["one", "two", "three"])], Compression::SNAPPY);
    let mut errors = 0;
    for (place, bits) in (0..whole.len()).map(|place| (place, [0x55, 0xff, 0x01, 0x80][place % 4])) {
        let mut broken = whole.clone();
        broken[place] ^= bits;
        let files = Files::new([("a.parquet", broken)]);
        errors += usize::from(files.open(&files.sources(), 0.0).is_err());
    }
    assert!(errors > whole.len() / 4, "{errors} of {}", whole.len());
    for len in [0, 3, 8, whole.len() - 1] {
        let files = Files::new([("a.parquet", &whole[..len])]);
        assert!(files.open(&files.sources(), 0.0).is_err());
    }
}
