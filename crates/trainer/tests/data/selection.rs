//! Files that are taken from a folder, and how much of each.

use crate::*;

/// Tokens of the texts that a source of all files takes within `max_bytes`.
fn taken(files: &Files, max_bytes: u64) -> Vec<u32> {
    files.tokens(DataSource { max_bytes: Some(max_bytes), ..files.sources().remove(0) })
}

/// A folder made by `hf download --local-dir`, with files added to it.
#[test]
fn a_folder_gives_its_data() {
    let line = "{\"text\": \"one\"}\n";
    let files = Files::new([
        ("train.jsonl", line),
        ("more/part.json", "[{\"text\": \"two\"}]"),
        ("text.txt", "three"),
        ("README.md", "# A description"),
        ("LICENSE", "None"),
        ("dataset_infos.json", "{\"text\": {}, \n\"size\": 3}"),
        ("others.json", "[{\"name\": \"x\"}]"),
        ("table.csv", "text\none"),
        ("train.jsonl.zip", "PK\x03\x04"),
        ("image", "P\0"),
        ("empty.txt", ""),
        // Caches name files in this way.
        ("0123abcd", "{\"text\": \"four\"}\n"),
        (".gitattributes", "*.parquet filter=lfs"),
        (".cache/huggingface/download/train.jsonl", line),
    ]);
    let dataset = files.all();
    assert_eq!(stream(&dataset).0, documents(["four", "two", "three", "one"]));
    assert_eq!(
        dataset.left_out().to_string(),
        "1 binary or not UTF-8, 1 compressed, 1 csv, 1 empty, 2 hidden, 2 json without the fields that are read, 2 text beside data"
    );
    let formats: Vec<_> = dataset.formats().iter().map(|(format, count)| format!("{count} {format}")).collect();
    assert_eq!((formats.join(", "), dataset.size().files), ("1 text, 2 jsonl, 1 json".into(), 4));
    // With `format`, all files are read.
    let source = DataSource { format: Some(Format::Text), ..files.source("more") };
    assert_eq!(files.tokens(source), documents(["[{\"text\": \"two\"}]"]));
}

/// Without data files, all text is taken: code and its descriptions. JSON may be data with other
/// field names, and is text only if `format` says so.
#[test]
fn a_folder_of_text_gives_all_of_it() {
    let files =
        Files::new([("a.rs", "one"), ("README.md", "two"), ("tsconfig.json", "{\n}"), ("list.json", "[{\"a\": 1}]")]);
    let dataset = files.all();
    assert_eq!(stream(&dataset).0, documents(["two", "one"]));
    assert_eq!(dataset.left_out().to_string(), "2 json without the fields that are read");
    let source = DataSource { format: Some(Format::Text), ..files.sources().remove(0) };
    assert_eq!(files.tokens(source), documents(["two", "one", "[{\"a\": 1}]", "{\n}"]));
    for json in ["[{\"a\": 1}]", "[\"one\"]", "[[1]]", "[]", "{\"data\": [{\"text\": \"one\"}]}", "{\n}"] {
        let error = Files::new([("a.json", json)]).error();
        let expected = "(left out: 1 json without the fields that are read): data.field names the field with the text";
        assert!(error.contains(expected), "{json}: {error}");
    }
    let files = Files::new([("dir/a.rs", "one"), ("dir/b.py", "two"), ("dir/c/d.rs", "three"), ("e.txt", "four")]);
    let source =
        DataSource { extension: Some("rs".into()), ..DataSource::new([files.path("dir"), files.path("e.txt")]) };
    assert_eq!(files.tokens(source), documents(["one", "three", "four"]));
}

/// Links may leave the folder, as in Hugging Face's cache. No file counts twice, the search
/// terminates, and a pipe, which would block a reader, is not opened.
#[cfg(unix)]
#[test]
fn links_and_pipes() {
    use std::os::unix::fs::symlink;

    let files = Files::new([("snapshot/a", "one"), ("blobs/0001", "two"), ("other/b", "three")]);
    symlink(files.path("snapshot"), files.path("snapshot/loop")).unwrap();
    symlink(files.path("snapshot/a"), files.path("snapshot/again")).unwrap();
    symlink("../blobs/0001", files.path("snapshot/link")).unwrap();
    symlink("../other", files.path("snapshot/folder")).unwrap();
    symlink("nowhere", files.path("snapshot/nothing")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(files.path("snapshot/pipe")).status().unwrap();
    assert!(made.success());
    let dataset = files.open(&[files.source("snapshot")], 0.0).unwrap();
    assert_eq!(stream(&dataset).0, documents(["one", "three", "two"]));
    assert_eq!(dataset.left_out().to_string(), "3 links to nothing or to what is read already, 1 pipes or devices");
    assert_eq!(files.tokens(files.source("snapshot/link")), documents(["two"]));
    let error = files.error_of(&[files.source("snapshot/pipe")]);
    assert!(error.contains("pipe: it is a pipe, a socket or a device, not a file"), "{error}");
}

/// A position in a file without a UTF-8 name can be saved and read.
#[cfg(target_os = "linux")]
#[test]
fn a_name_need_not_be_utf_8() {
    use std::os::unix::ffi::OsStrExt;

    let name = std::ffi::OsStr::from_bytes(b"caf\xe9.txt");
    let files = Files::new([(name, "one")]);
    let dataset = files.all();
    let sequences = dataset.train(wrapped(2), 1).unwrap();
    let json = serde_json::to_string(&sequences.position()).unwrap();
    let position: Position = serde_json::from_str(&json).unwrap();
    assert_eq!(position, sequences.position());
    dataset.train(wrapped(2), 1).unwrap().seek(&position).unwrap();
    // The file is identified by its name.
    fs::write(files.path(name), "six").unwrap();
    let error = files.all().train(wrapped(2), 1).unwrap().seek(&position).unwrap_err().to_string();
    assert!(error.contains("caf\u{fffd}.txt changed since the checkpoint"), "{error}");
}

#[test]
fn max_bytes() {
    // Files are taken at even distances.
    let files = Files::new((0..8).map(|i| (format!("{i}"), i.to_string().repeat(10))));
    let texts = |numbers: &[u32]| documents(numbers.iter().map(|i| i.to_string().repeat(10)));
    assert_eq!(taken(&files, 40), texts(&[1, 3, 5, 7]));
    assert_eq!(taken(&files, 20), texts(&[3, 7]));
    for all in [80, 1000] {
        assert_eq!(taken(&files, all), texts(&[0, 1, 2, 3, 4, 5, 6, 7]));
    }
    // If that leaves many bytes, the largest remaining files follow, and the last is cut.
    let files = Files::new([("a", "x".repeat(5)), ("b", "y".repeat(100)), ("c", "z".repeat(70))]);
    assert_eq!(taken(&files, 60), documents(["y".repeat(60)]));
    assert_eq!(taken(&files, 120), documents(["z".repeat(70), "y".repeat(50)]));
    // No character and no line is cut.
    let files = Files::new([("a", "\u{e9}".repeat(10))]);
    assert_eq!(taken(&files, 7), documents(["\u{e9}".repeat(3)]));
    let error = files.error_of(&[DataSource { max_bytes: Some(1), ..files.sources().remove(0) }]);
    assert!(error.ends_with("within max_bytes = 1 (left out: 1 beyond max_bytes)"), "{error}");
    let line = "{\"text\": \"one\"}\n";
    let files = Files::new([("a.jsonl", line.repeat(10))]);
    assert_eq!(taken(&files, line.len() as u64 * 3 - 1), documents(["one", "one"]));
}
