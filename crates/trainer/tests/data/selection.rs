//! Files that are taken from a folder, and how much of each.

use crate::*;

/// Text, lines and arrays of JSON, folders as `hf download --local-dir` makes them, folders of code, and
/// parts of them. Files of `max_bytes` are taken at even distances; if that leaves many bytes, the
/// largest remaining ones follow, and the last is cut, but no character, line or element. A row has
/// files, a source (of all files, by default), its documents, and what is left out, or the end of the
/// error.
#[test]
fn sources_give_their_documents() {
    type Row = (BTreeMap<String, String>, Value, Option<Vec<String>>, Option<String>);
    for (files, mut source, texts, said) in table::<Row>("vectors/sources") {
        let at = format!("{files:?} {source}");
        let files = Files::new(files);
        let paths = source["paths"].as_array().cloned().unwrap_or(vec!["".into()]);
        source["paths"] = paths.iter().map(|path| files.path(path.as_str().unwrap()).display().to_string()).collect();
        let mut own = |key: &str| source.as_object_mut().unwrap().remove(key);
        let (max_bytes, extension) = (own("max_bytes"), own("extension"));
        let (max_bytes, extension) =
            (max_bytes.and_then(|n| n.as_u64()), extension.map(|text| text.as_str().unwrap().into()));
        let source = DataSource { max_bytes, extension, ..serde_json::from_value(source).unwrap() };
        match texts {
            Some(texts) => {
                let dataset = files.open(&[source], 0.0).unwrap();
                let begins = texts.iter().scan(0, |place, text| {
                    *place += text.len() + 1;
                    Some(*place - text.len() - 1)
                });
                assert_eq!(stream(&dataset), (documents(&texts), begins.collect()), "{at}");
                assert!(said.is_none_or(|left_out| dataset.left_out().to_string() == left_out), "{at}");
            }
            None => assert!(files.error_of(&[source]).contains(&said.unwrap()), "{at}"),
        }
    }
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
