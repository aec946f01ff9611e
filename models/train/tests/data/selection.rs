//! Files that are taken from a folder, and how much of each.

use std::fs;

use train::{DataSource, Format, Position};

use crate::{Files, documents, stream, wrapped};

/// Tokens of the texts that a source of all files takes within `max_bytes`.
fn taken(files: &Files, max_bytes: u64) -> Vec<u32> {
    let source = DataSource { max_bytes: Some(max_bytes), ..files.sources().remove(0) };
    stream(&files.open(&[source], 0.0).unwrap()).0
}

#[test]
fn files_that_are_no_text_are_counted() {
    let files = Files::new([
        ("a", &b"text"[..]),
        ("b/empty", b""),
        ("b/nul", b"a\0"),
        ("c", b"\xff"),
        ("d", "\u{e9}".as_bytes()),
    ]);
    let dataset = files.all();
    assert_eq!((dataset.size().files, dataset.size().skipped), (2, 3));
    assert_eq!(stream(&dataset).0, documents(["text", "\u{e9}"]));
}

#[test]
fn a_character_that_the_file_cuts_is_no_text() {
    let files = Files::new([("a", &b"text"[..]), ("b", &"\u{e9}".as_bytes()[..1])]);
    assert_eq!(files.all().size().skipped, 1);
}

#[test]
fn an_extension_is_of_files_in_folders() {
    let files = Files::new([("dir/a.rs", "one"), ("dir/b.py", "two"), ("dir/c/d.rs", "three"), ("e.txt", "four")]);
    let source =
        DataSource { extension: Some("rs".into()), ..DataSource::new([files.path("dir"), files.path("e.txt")]) };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["one", "three", "four"]));
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
        // Caches name files in this way.
        ("0123abcd", "{\"text\": \"four\"}\n"),
        (".gitattributes", "*.parquet filter=lfs"),
        (".cache/huggingface/download/train.jsonl", line),
    ]);
    let dataset = files.all();
    assert_eq!(stream(&dataset).0, documents(["four", "two", "three", "one"]));
    assert_eq!(
        dataset.left_out().to_string(),
        "2 hidden, 2 text beside data, 2 json without the fields that are read, 1 csv, 1 compressed, 1 binary or not UTF-8"
    );
    let formats: Vec<_> = dataset.formats().iter().map(|(format, count)| format!("{count} {format}")).collect();
    assert_eq!(formats, ["1 text", "2 jsonl", "1 json"]);
    assert_eq!((dataset.size().files, dataset.size().skipped), (4, 9));
    // With `format`, all files are read.
    let source = DataSource { format: Some(Format::Text), ..DataSource::new([files.path("more")]) };
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(["[{\"text\": \"two\"}]"]));
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
    let source = DataSource { format: Some(Format::Text), ..DataSource::new([files.root()]) };
    let all = ["two", "one", "[{\"a\": 1}]", "{\n}"];
    assert_eq!(stream(&files.open(&[source], 0.0).unwrap()).0, documents(all));
    for json in ["[{\"a\": 1}]", "[\"one\"]", "[[1]]", "[]", "{\"data\": [{\"text\": \"one\"}]}", "{\n}"] {
        let error = Files::new([("a.json", json)]).error();
        let expected = "(left out: 1 json without the fields that are read): data.field names the field with the text";
        assert!(error.contains(expected), "{json}: {error}");
    }
}

/// Links may leave the folder, as in Hugging Face's cache. No file counts twice, and the search
/// terminates.
#[cfg(unix)]
#[test]
fn links_are_followed() {
    use std::os::unix::fs::symlink;

    let files = Files::new([("snapshot/a", "one"), ("blobs/0001", "two"), ("other/b", "three")]);
    symlink(files.path("snapshot"), files.path("snapshot/loop")).unwrap();
    symlink(files.path("snapshot/a"), files.path("snapshot/again")).unwrap();
    symlink("../blobs/0001", files.path("snapshot/link")).unwrap();
    symlink("../other", files.path("snapshot/folder")).unwrap();
    symlink("nowhere", files.path("snapshot/nothing")).unwrap();
    let dataset = files.open(&[files.source("snapshot")], 0.0).unwrap();
    assert_eq!(stream(&dataset).0, documents(["one", "three", "two"]));
    assert_eq!(dataset.left_out().to_string(), "3 links to nothing or to what is read already");
    assert_eq!(stream(&files.open(&[files.source("snapshot/link")], 0.0).unwrap()).0, documents(["two"]));
}

/// Opening a pipe blocks until its other end is open.
#[cfg(unix)]
#[test]
fn pipes_are_not_opened() {
    let files = Files::new([("a", "one")]);
    let made = std::process::Command::new("mkfifo").arg(files.path("pipe")).status().unwrap();
    assert!(made.success());
    let dataset = files.all();
    assert_eq!(stream(&dataset).0, documents(["one"]));
    assert_eq!(dataset.left_out().to_string(), "1 pipes or devices");
    let error = files.error_of(&[files.source("pipe")]);
    assert!(error.contains("pipe: it is a pipe, a socket or a device, not a file"), "{error}");
}

/// A position in a file without a UTF-8 name can be saved and read.
#[cfg(target_os = "linux")]
#[test]
fn a_name_need_not_be_utf_8() {
    use std::os::unix::ffi::OsStrExt;

    let name = std::ffi::OsStr::from_bytes(b"caf\xe9.txt");
    let files = Files::new([(name, "one"), (std::ffi::OsStr::new("b"), "two")]);
    let dataset = files.all();
    let mut sequences = dataset.train(wrapped(2), 1).unwrap();
    sequences.next().unwrap().unwrap();
    let position = serde_json::to_string(&sequences.position()).unwrap();
    let position: Position = serde_json::from_str(&position).unwrap();
    assert_eq!(position, sequences.position());
    dataset.train(wrapped(2), 1).unwrap().seek(&position).unwrap();
    // The file is identified by its name.
    fs::write(files.path(name), "six").unwrap();
    let error = files.all().train(wrapped(2), 1).unwrap().seek(&position).unwrap_err().to_string();
    assert!(error.contains("caf\u{fffd}.txt changed since the checkpoint"), "{error}");
}

/// Half of the bytes: every other file.
#[test]
fn files_are_taken_at_even_distances() {
    let files = Files::new((0..8).map(|i| (format!("{i}"), i.to_string().repeat(10))));
    let texts = |numbers: &[u32]| documents(numbers.iter().map(|i| i.to_string().repeat(10)));
    assert_eq!(taken(&files, 40), texts(&[1, 3, 5, 7]));
    assert_eq!(taken(&files, 20), texts(&[3, 7]));
    assert_eq!(taken(&files, 80), texts(&[0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(taken(&files, 1000), texts(&[0, 1, 2, 3, 4, 5, 6, 7]));
}

/// If that leaves many bytes, the largest remaining files follow, and the last is cut.
#[test]
fn the_largest_others_follow() {
    let files = Files::new([("a", "x".repeat(5)), ("b", "y".repeat(100)), ("c", "z".repeat(70))]);
    assert_eq!(taken(&files, 60), documents(["y".repeat(60)]));
    assert_eq!(taken(&files, 120), documents(["z".repeat(70), "y".repeat(50)]));
}

#[test]
fn no_character_is_cut() {
    let files = Files::new([("a", "\u{e9}".repeat(10))]);
    assert_eq!(taken(&files, 7), documents(["\u{e9}".repeat(3)]));
    let source = DataSource { max_bytes: Some(1), ..files.sources().remove(0) };
    let error = files.error_of(&[source]);
    assert!(error.ends_with("within max_bytes = 1 (left out: 1 beyond max_bytes)"), "{error}");
}

#[test]
fn no_line_is_cut() {
    let line = "{\"text\": \"one\"}\n";
    let files = Files::new([("a.jsonl", line.repeat(10))]);
    assert_eq!(taken(&files, line.len() as u64 * 3 - 1), documents(["one", "one"]));
}

/// A file that was skipped in one run may be text in the next.
#[test]
fn a_file_is_looked_at_again_when_it_changes() {
    let files = Files::new([("a", "one"), ("b", "")]);
    assert_eq!(files.all().size().skipped, 1);
    fs::write(files.path("b"), "two").unwrap();
    assert_eq!(stream(&files.all()).0, documents(["one", "two"]));
}
