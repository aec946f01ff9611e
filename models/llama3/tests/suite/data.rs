//! Which text is read, how it is split, and what is too little.

use std::fs;
use std::path::PathBuf;

use llama3::Error;
use llama3::batches::{BatchShape, TrainBatches, held_out_batches};
use llama3::data::{Corpus, TextSource};
use llama3::tokenizer::ByteTokenizer;

use crate::common::{values, write_text};

fn source(paths: Vec<PathBuf>) -> TextSource {
    TextSource { paths, extension: None, max_bytes: 1_000_000, held_out_fraction: 0.2 }
}

fn documents(tokens: &[u32]) -> Vec<String> {
    tokens.split(|&token| token == ByteTokenizer::BOS).map(ByteTokenizer::decode).skip(1).collect()
}

#[test]
fn folders_are_searched_in_order_and_documents_are_held_out_whole() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("b/c")).unwrap();
    for (name, text) in [("b/c/2.txt", "two"), ("a.txt", "one"), ("d.txt", "three"), ("b/1.txt", "1"), ("e.txt", "é")]
    {
        fs::write(dir.path().join(name), text).unwrap();
    }
    fs::write(dir.path().join("empty"), "").unwrap();
    fs::write(dir.path().join("binary"), [1, 0, 2]).unwrap();
    fs::write(dir.path().join("latin1"), [b'a', 0xe9]).unwrap();

    let Corpus { train, held_out, files, skipped } = source(vec![dir.path().into()]).load().unwrap();
    assert_eq!((files, skipped), (5, 3));
    // Sorted: a, b/1, b/c/2, d, e. After "a" and "1" the held-out share is 0.2 * 6 = 1.2 tokens, too few for "1" + BOS.
    assert_eq!(documents(&train), ["one", "1", "two", "three"]);
    assert_eq!(documents(&held_out), ["é"]);
}

#[test]
fn a_single_file_is_cut_for_the_held_out_part() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    let text: String = ('a'..='z').cycle().take(999).collect();
    fs::write(&file, &text).unwrap();
    let corpus = source(vec![file]).load().unwrap();
    assert_eq!((corpus.train.len(), corpus.held_out.len()), (800, 200));
    let together = [corpus.train, corpus.held_out].concat();
    assert_eq!(documents(&together), [text]);
}

#[test]
fn more_text_than_asked_for_is_sampled_evenly() {
    let dir = tempfile::tempdir().unwrap();
    for file in 0..100 {
        fs::write(dir.path().join(format!("{file:03}")), format!("{file:03}").repeat(10)).unwrap();
    }
    let some = TextSource { max_bytes: 600, ..source(vec![dir.path().into()]) };
    let corpus = some.load().unwrap();
    assert_eq!(corpus.files, 20);
    assert_eq!(corpus, some.load().unwrap());
    let mut chosen: Vec<usize> = [documents(&corpus.train), documents(&corpus.held_out)]
        .concat()
        .iter()
        .map(|text| text[..3].parse().unwrap())
        .collect();
    chosen.sort_unstable();
    assert!(chosen.windows(2).all(|pair| pair[1] - pair[0] == 5), "{chosen:?}");

    // One file larger than the limit is cut, and not inside a character.
    let large = dir.path().join("large");
    fs::write(&large, "é".repeat(1000)).unwrap();
    let corpus = TextSource { max_bytes: 101, ..source(vec![large]) }.load().unwrap();
    assert_eq!(corpus.train.len() + corpus.held_out.len(), 101);
}

#[test]
fn only_the_extension_asked_for_and_every_explicit_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("src")).unwrap();
    fs::write(dir.path().join("src/a.rs"), "rust").unwrap();
    fs::write(dir.path().join("src/a.md"), "prose").unwrap();
    fs::write(dir.path().join("note"), "note").unwrap();
    let paths = vec![dir.path().join("src"), dir.path().join("note")];
    let corpus = TextSource { extension: Some("rs"), ..source(paths) }.load().unwrap();
    assert_eq!(documents(&[corpus.train, corpus.held_out].concat()), ["rust", "note"]);
}

#[test]
fn missing_and_textless_paths_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent");
    match source(vec![absent.clone()]).load() {
        Err(Error::Io { path, .. }) => assert_eq!(path, absent),
        other => panic!("{other:?}"),
    }
    assert!(matches!(source(vec![dir.path().into()]).load(), Err(Error::NoText { skipped: 0, .. })));
    fs::write(dir.path().join("binary"), [0; 4]).unwrap();
    assert!(matches!(source(vec![dir.path().into()]).load(), Err(Error::NoText { skipped: 1, .. })));
    assert!(matches!(source(vec![dir.path().join("binary")]).load(), Err(Error::NoText { skipped: 1, .. })));
}

#[cfg(unix)]
#[test]
fn links_do_not_make_a_search_endless() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a"), "text").unwrap();
    std::os::unix::fs::symlink(dir.path(), dir.path().join("loop")).unwrap();
    assert_eq!(source(vec![dir.path().into()]).load().unwrap().files, 1);
}

#[test]
fn batches_predict_the_next_token_and_repeat_by_seed() {
    let stream: Vec<u32> = (0..500).collect();
    let shape = BatchShape { batch_size: 3, seq_len: 7 };
    let take = |seed| -> Vec<_> { TrainBatches::new(&stream, shape, seed).unwrap().take(4).collect() };
    assert_eq!(take(1), take(1));
    assert_ne!(take(1), take(2));
    for batch in take(1) {
        assert_eq!(batch.num_tokens(), 21);
        let [inputs, targets] = batch.tensors::<burn::backend::Flex>(&Default::default());
        assert_eq!((inputs.dims(), targets.dims()), ([3, 7], [3, 7]));
        // In this stream every token is followed by its successor.
        assert!(values((targets - inputs).float()).iter().all(|&step| step == 1.0));
    }
}

#[test]
fn held_out_windows_are_spread_and_disjoint() {
    let stream: Vec<u32> = (0..1000).collect();
    let shape = BatchShape { batch_size: 2, seq_len: 9 };
    let starts = |count| -> Vec<i64> {
        let batches = held_out_batches(&stream, shape, count).unwrap();
        let first = |batch: &llama3::batches::Batch| {
            let [inputs, _] = batch.tensors::<burn::backend::Flex>(&Default::default());
            inputs.slice([0..2, 0..1]).into_data().iter::<i64>().collect::<Vec<_>>()
        };
        batches.iter().flat_map(first).collect()
    };
    assert_eq!(starts(5), (0..10).map(|i| i * 100).collect::<Vec<_>>());
    // No more than there are, and then all of them.
    assert_eq!(starts(1000), (0..100).map(|i| i * 10).collect::<Vec<_>>());
}

#[test]
fn too_little_text_is_an_error_with_numbers() {
    let shape = BatchShape { batch_size: 4, seq_len: 9 };
    let stream = vec![0; 40];
    assert!(TrainBatches::new(&stream, shape, 0).is_ok());
    assert_eq!(held_out_batches(&stream, shape, 3).unwrap().len(), 1);
    let error = TrainBatches::new(&stream[1..], shape, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "too little text: the training split has 39 tokens, one batch of 4 sequences of 9 + 1 tokens needs 40"
    );
    assert!(matches!(
        held_out_batches(&stream[1..], shape, 3),
        Err(Error::DataTooSmall { split: "held-out", have: 39, need: 40, .. })
    ));
}

#[test]
fn text_survives_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    write_text(dir.path(), 1);
    let text = fs::read_to_string(dir.path().join("00.rs")).unwrap() + "é�\u{10ffff}";
    let tokens = ByteTokenizer::encode(&text);
    assert!(tokens.iter().all(|&token| (token as usize) < ByteTokenizer::NUM_BYTES));
    assert_eq!(ByteTokenizer::decode(&tokens), text);
    assert_eq!(ByteTokenizer::decode(&[ByteTokenizer::BOS, 97, 300, 98]), "ab");
    assert_eq!(ByteTokenizer::decode(&[0xc3]), "\u{fffd}");
}
