//! Which text is read, how it is split, and what is too little.

use std::fs;
use std::path::PathBuf;

use llama3::Error;
use llama3::data::{Corpus, TextSource};
use train::batches::{BatchError, BatchShape, TrainBatches, held_out_batches};
use train::{ByteTokenizer, Tokenizer};

use crate::common::values;

fn source(paths: Vec<PathBuf>) -> TextSource {
    TextSource { paths, extension: None, max_bytes: 1_000_000, held_out_fraction: 0.2, is_default: false }
}

fn documents(tokens: &[u32]) -> Vec<String> {
    let text = |tokens: &[u32]| Tokenizer::bytes().decode(tokens).unwrap();
    tokens.split(|&token| token == ByteTokenizer::BOS).map(text).skip(1).collect()
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

    let Corpus { train, held_out, files, skipped } = source(vec![dir.path().into()]).load(&Tokenizer::bytes()).unwrap();
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
    let corpus = source(vec![file]).load(&Tokenizer::bytes()).unwrap();
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
    let corpus = some.load(&Tokenizer::bytes()).unwrap();
    assert_eq!(corpus.files, 20);
    assert_eq!(corpus, some.load(&Tokenizer::bytes()).unwrap());
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
    let corpus = TextSource { max_bytes: 101, ..source(vec![large]) }.load(&Tokenizer::bytes()).unwrap();
    assert_eq!(corpus.train.len() + corpus.held_out.len(), 101);
}

#[test]
fn a_folder_with_one_large_file_works_as_the_file_does() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus");
    fs::write(&corpus, "aé".repeat(2000)).unwrap();
    let load =
        |path: PathBuf, max_bytes| TextSource { max_bytes, ..source(vec![path]) }.load(&Tokenizer::bytes()).unwrap();
    for max_bytes in [4000, 4001] {
        let alone = load(corpus.clone(), max_bytes);
        // Three bytes make "aé": 4000 bytes end with an "a", 4001 would end inside an "é".
        assert_eq!(alone.train.len() + alone.held_out.len(), 4001);
        assert!(alone.held_out.len() >= 800);

        fs::write(dir.path().join("README"), "short\n").unwrap();
        fs::write(dir.path().join("empty"), "").unwrap();
        let expected = Corpus { skipped: 1, ..alone };
        assert_eq!(load(dir.path().into(), max_bytes), expected, "a file before it, and an empty one");
    }

    // A binary file that is larger still does not take the text's place, and small files keep their share.
    fs::write(dir.path().join("binary"), [0; 10_000]).unwrap();
    for file in 0..100 {
        fs::write(dir.path().join(format!("x{file:02}")), [b'x'; 20]).unwrap();
    }
    let Corpus { train, held_out, files, skipped } = load(dir.path().into(), 4000);
    let small = train.iter().chain(&held_out).filter(|&&token| token == u32::from(b'x')).count();
    assert_eq!(small, 2000, "after the files that were passed over, all of the small ones fit");
    assert_eq!(skipped, 2, "empty and binary");
    let bytes = train.len() + held_out.len() - files;
    assert!((3998..=4000).contains(&bytes), "{bytes}");
}

#[test]
fn a_limit_that_leaves_no_text_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a"), "é".repeat(100)).unwrap();
    let one = TextSource { max_bytes: 1, ..source(vec![dir.path().into()]) };
    let error = one.load(&Tokenizer::bytes()).unwrap_err();
    assert!(matches!(error, Error::NoText { max_bytes: 1, skipped: 1, .. }), "{error:?}");
    assert!(error.to_string().contains("data.max_bytes = 1"), "{error}");
    fs::write(dir.path().join("b"), "x".repeat(100)).unwrap();
    let corpus = one.load(&Tokenizer::bytes()).unwrap();
    assert_eq!((corpus.files, documents(&corpus.train)), (1, vec!["x".to_string()]));
    let error = held_out_batches(&corpus.held_out, BatchShape { batch_size: 1, seq_len: 8 }, 1).unwrap_err();
    assert!(error.to_string().contains("raise data.max_bytes"), "{error}");
}

#[test]
fn a_missing_registry_says_how_to_do_without() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().join("absent"), dir.path().into()] {
        let error = TextSource { is_default: true, ..source(vec![path]) }.load(&Tokenizer::bytes()).unwrap_err();
        assert!(matches!(error, Error::NoDefaultText { .. }), "{error:?}");
        assert!(error.to_string().contains("--data PATH"), "{error}");
    }
    assert!(TextSource::cargo_registry(1, 0.5).is_default);
}

#[test]
fn only_the_extension_asked_for_and_every_explicit_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("src")).unwrap();
    fs::write(dir.path().join("src/a.rs"), "rust").unwrap();
    fs::write(dir.path().join("src/a.md"), "prose").unwrap();
    fs::write(dir.path().join("note"), "note").unwrap();
    let paths = vec![dir.path().join("src"), dir.path().join("note")];
    let corpus = TextSource { extension: Some("rs"), ..source(paths) }.load(&Tokenizer::bytes()).unwrap();
    assert_eq!(documents(&[corpus.train, corpus.held_out].concat()), ["rust", "note"]);
}

#[test]
fn missing_and_textless_paths_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent");
    match source(vec![absent.clone()]).load(&Tokenizer::bytes()) {
        Err(Error::Io { path, .. }) => assert_eq!(path, absent),
        other => panic!("{other:?}"),
    }
    assert!(matches!(source(vec![dir.path().into()]).load(&Tokenizer::bytes()), Err(Error::NoText { skipped: 0, .. })));
    fs::write(dir.path().join("binary"), [0; 4]).unwrap();
    assert!(matches!(source(vec![dir.path().into()]).load(&Tokenizer::bytes()), Err(Error::NoText { skipped: 1, .. })));
    assert!(matches!(
        source(vec![dir.path().join("binary")]).load(&Tokenizer::bytes()),
        Err(Error::NoText { skipped: 1, .. })
    ));
}

#[cfg(unix)]
#[test]
fn links_do_not_make_a_search_endless() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a"), "text").unwrap();
    std::os::unix::fs::symlink(dir.path(), dir.path().join("loop")).unwrap();
    assert_eq!(source(vec![dir.path().into()]).load(&Tokenizer::bytes()).unwrap().files, 1);
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
        let first = |batch: &train::batches::Batch| {
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
        "too little text: the training split has 39 tokens, one batch of 4 sequences of 9 + 1 tokens needs 40: \
         give more text or raise data.max_bytes, data.held_out_fraction moves text between the splits"
    );
    assert!(matches!(
        held_out_batches(&stream[1..], shape, 3),
        Err(BatchError { split: "held-out", have: 39, need: 40, .. })
    ));
}
