//! Which files of a folder are taken, and how much of them.

use std::fs;

use train::DataSource;

use crate::{Files, documents, stream};

/// The texts that a source of all files within `max_bytes` takes.
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

#[cfg(unix)]
#[test]
fn links_are_not_followed() {
    let files = Files::new([("a", "one"), ("dir/b", "two")]);
    std::os::unix::fs::symlink(files.root(), files.path("dir/loop")).unwrap();
    std::os::unix::fs::symlink(files.path("a"), files.path("dir/link")).unwrap();
    assert_eq!(stream(&files.all()).0, documents(["one", "two"]));
    // An explicit one is.
    assert_eq!(stream(&files.open(&[files.source("dir/link")], 0.0).unwrap()).0, documents(["one"]));
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

/// Where that leaves much, the largest other files follow, and the last is cut.
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
    assert!(
        error.ends_with("(1 files skipped: empty, binary, not UTF-8, or cut to nothing by max_bytes = 1)"),
        "{error}"
    );
}

#[test]
fn no_line_is_cut() {
    let line = "{\"text\": \"one\"}\n";
    let files = Files::new([("a.jsonl", line.repeat(10))]);
    assert_eq!(taken(&files, line.len() as u64 * 3 - 1), documents(["one", "one"]));
}

/// What was passed over in one run may be text in the next.
#[test]
fn a_file_is_looked_at_again_when_it_changes() {
    let files = Files::new([("a", "one"), ("b", "")]);
    assert_eq!(files.all().size().skipped, 1);
    fs::write(files.path("b"), "two").unwrap();
    assert_eq!(stream(&files.all()).0, documents(["one", "two"]));
}
