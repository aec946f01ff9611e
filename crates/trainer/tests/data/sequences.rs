//! Order of sequences, sources with weights, and positions: from any position the rest equals an
//! uninterrupted run, and a position in other data is refused.

use crate::*;
use proptest::prelude::*;
use trainer::rng::Rng;

fn sorted(mut sequences: Vec<Sequence>) -> Vec<Sequence> {
    sequences.sort_by(|a, b| a.tokens.cmp(&b.tokens));
    sequences
}

const WEIGHTS: [f64; 3] = [5.0, 3.0, 2.0];

/// Three sources of different sizes: lower case letters, upper case letters and digits.
fn weighted() -> (Files, Vec<DataSource>) {
    let mut rng = Rng::new(9);
    let text = noise(&mut rng, 400);
    let digits: String = (0..150).map(|_| char::from(b'0' + rng.below(10) as u8)).collect();
    let files = Files::new([("a", &text), ("b", &text[..70].to_uppercase()), ("c", &digits)]);
    let source = |(name, weight)| DataSource { weight: Some(weight), ..files.source(name) };
    let sources = ["a", "b", "c"].into_iter().zip(WEIGHTS).map(source).collect();
    (files, sources)
}

fn source_of(sequence: &Sequence) -> usize {
    match char::from_u32(sequence.tokens[1]) {
        Some('a'..='z') => 0,
        Some('A'..='Z') => 1,
        _ => 2,
    }
}

/// A source is never more than one sequence from its share, however often its epochs restart. The
/// one that is furthest behind its share comes next, or the first of several.
#[test]
fn each_source_has_its_share_and_its_epochs() {
    let (files, mut sources) = weighted();
    let open = |sources: &[_]| files.open(sources, 0.0).unwrap().train(wrapped(10), 1).unwrap();
    let mut sequences = open(&sources);
    assert_eq!(sequences.sequences_per_epoch(), [40, 7, 15]);
    let all = take(&mut sequences, 500);
    let order: Vec<_> = all.iter().map(source_of).collect();
    assert_eq!(order, [0, 1, 2, 0, 0, 1, 0, 2, 1, 0].repeat(50));
    let epochs: Vec<u64> = sequences.position().streams.iter().map(|stream| stream.epoch).collect();
    assert_eq!((epochs, sequences.taken()), (vec![250 / 40, 150 / 7, 100 / 15], 500));
    for (source, count) in [40, 7, 15].into_iter().enumerate() {
        let own: Vec<Sequence> = all.iter().filter(|sequence| source_of(sequence) == source).cloned().collect();
        let epochs: Vec<_> = own.chunks_exact(count).collect();
        assert!(epochs.len() > 5 && epochs[0] != epochs[1]);
        assert!(epochs.iter().all(|epoch| sorted(epoch.to_vec()) == sorted(epochs[0].to_vec())));
    }
    // Only the proportions of weights count.
    sources.iter_mut().for_each(|source| source.weight = source.weight.map(|weight| weight * 4.0));
    assert_eq!(take(&mut open(&sources), 100), all[..100]);
    sources[0].weight = Some(1.0);
    assert_ne!(take(&mut open(&sources), 100), all[..100]);
    // Without weights, sources are mixed in proportion to their sizes.
    sources.iter_mut().for_each(|source| source.weight = None);
    assert_eq!(open(&sources).sequences_per_epoch(), [40 + 7 + 15]);
}

#[test]
fn weights_that_cannot_be_used() {
    let (files, sources) = weighted();
    files.write("tiny.jsonl", "\n");
    for (i, weight, expected) in [
        (1, Some(0.0), "weight = 0 of PATH: weights must be positive and finite"),
        (1, Some(-1.0), "weight = -1 of PATH: weights must be"),
        (1, Some(f64::NAN), "weight = NaN of PATH: weights must be"),
        (1, Some(f64::INFINITY), "weight = inf of PATH: weights must be"),
        (2, None, "no weight of PATH, where other sources have one"),
        (3, Some(1.0), "nothing to train on in PATH, which has a weight: give more text, or leave this source out"),
    ] {
        let mut sources = sources.clone();
        sources.truncate(i);
        sources.push(DataSource { weight, ..files.source(["a", "b", "c", "tiny.jsonl"][i]) });
        let dataset = files.open(&sources, 0.0);
        let error = message(&dataset.and_then(|dataset| dataset.train(wrapped(10), 1)).unwrap_err());
        let path = sources[i].paths[0].display().to_string();
        assert!(error.starts_with(&expected.replace("PATH", &path)), "{error}");
    }
}

fn files() -> Files {
    let mut rng = Rng::new(11);
    let lines = lines((0..30).map(|i| noise(&mut rng, 5 + i)).collect::<Vec<_>>());
    let files = Files::new([("a.txt", noise(&mut rng, 250)), ("b.jsonl", lines)]);
    files.write("c.json", format!("[{{\"text\": \"{}\"}}]", noise(&mut rng, 300)));
    files
}

/// All files as one source, or each as a source with a weight.
fn open(files: &Files, is_mixture: bool) -> Dataset {
    let weighted = |(name, weight)| DataSource { weight: Some(weight), ..files.source(name) };
    let sources = match is_mixture {
        true => [("a.txt", 1.0), ("b.jsonl", 2.5), ("c.json", 0.7)].map(weighted).to_vec(),
        false => files.sources(),
    };
    files.open(&sources, 0.1).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn goes_on_with_the_same_sequences(taken in 0..300_usize, seq_len in 5..40_usize, seed: u64, is_mixture: bool, is_whole: bool) {
        let files = files();
        let shape = if is_whole { whole(seq_len) } else { wrapped(seq_len) };
        let mut uninterrupted = open(&files, is_mixture).train(shape, seed).unwrap();
        take(&mut uninterrupted, taken);
        let position = serde_json::to_string(&uninterrupted.position()).unwrap();
        let position: Position = serde_json::from_str(&position).unwrap();
        prop_assert_eq!(position.sequences, taken as u64);
        let expected = take(&mut uninterrupted, 100);

        let mut resumed = open(&files, is_mixture).train(shape, seed).unwrap();
        resumed.seek(&position).unwrap();
        prop_assert_eq!(resumed.position(), position);
        prop_assert_eq!(take(&mut resumed, 100), expected);
        prop_assert_eq!(resumed.position(), uninterrupted.position());
    }
}

#[test]
fn a_changed_file_is_named() {
    let changed = |files: &Files, name: &str, place: usize| {
        let mut bytes = fs::read(files.path(name)).unwrap();
        bytes[place] ^= 1;
        Some(bytes)
    };
    let files = files();
    for (name, content, expected) in [
        ("a.txt", Some(b"shorter, but long enough for a sequence".to_vec()), "it had 250 bytes, now it has 39"),
        ("b.jsonl", changed(&files, "b.jsonl", 12), "it has the same size but other content"),
        ("c.json", changed(&files, "c.json", 30), "it has the same size but other content"),
        ("a.txt", None, "it is no longer there, or it is left out now"),
        ("new.txt", Some(b"one more".to_vec()), "it was not there then"),
    ] {
        let files = self::files();
        let mut before = open(&files, false).train(wrapped(10), 1).unwrap();
        take(&mut before, 5);
        match content {
            Some(content) => files.write(name, content),
            None => fs::remove_file(files.path(name)).unwrap(),
        }
        let error = open(&files, false).train(wrapped(10), 1).unwrap().seek(&before.position()).unwrap_err();
        let expected = format!("{name} changed since the checkpoint: {expected}");
        assert!(message(&error).ends_with(&expected), "{}", message(&error));
    }
    // A position does not list many files.
    let files = Files::new((0..1001).map(|i| (i.to_string(), "text")));
    let position = files.all().train(wrapped(10), 1).unwrap().position();
    let source = &position.streams[0].sources[0];
    assert_eq!((source.num_files, source.files.len()), (1001, 0));
    files.all().train(wrapped(10), 1).unwrap().seek(&position).unwrap();
    for (name, expected) in
        [("7", "one or more of the files have other content"), ("new", "the number of files was 1001, now it is 1002")]
    {
        files.write(name, "TEXT");
        let error = message(&files.all().train(wrapped(10), 1).unwrap().seek(&position).unwrap_err());
        assert_eq!(error, format!("the data changed since the checkpoint: {expected}"));
    }
}

/// Files rewritten with the same content, or moved with their folder, are the same data.
#[test]
fn the_same_content_is_the_same_data() {
    let files = files();
    let mut before = open(&files, false).train(wrapped(10), 1).unwrap();
    take(&mut before, 5);
    let position = before.position();
    let text = fs::read(files.path("a.txt")).unwrap();
    fs::write(files.path("a.txt"), text).unwrap();
    let moved = files.dir.path().join("moved");
    fs::rename(files.root(), &moved).unwrap();
    let dataset = files.open(&[DataSource::new([&moved])], 0.1).unwrap();
    assert!(dataset.was_cached());
    let mut after = dataset.train(wrapped(10), 1).unwrap();
    after.seek(&position).unwrap();
    assert_eq!(take(&mut after, 50), take(&mut before, 50));
}

#[test]
fn other_settings_are_named() {
    let files = files();
    let bytes = Tokenizer::bytes();
    let mut position = open(&files, false).train(wrapped(10), 1).unwrap().position();
    let same = || open(&files, false);
    let of = |fraction| files.open(&files.sources(), fraction).unwrap();
    let two = [files.source("a.txt"), DataSource::new([files.path("b.jsonl"), files.path("c.json")])];
    let templated = files.open_with(&files.sources(), 0.1, &bytes, Some(&template(""))).unwrap();
    let pairs = files.open_with(&files.sources(), 0.1, &folder_with_tokenizer(), None).unwrap();
    let seek = |dataset: Dataset, shape: SequenceShape, seed, position: &Position| {
        message(&dataset.train(shape, seed).unwrap().seek(position).unwrap_err())
    };
    for (dataset, shape, seed, expected) in [
        (same(), wrapped(10), 2, "its seed was 1, now it is 2"),
        (same(), wrapped(11), 1, "seq_len was 10, now it is 11"),
        (same(), whole(10), 1, "packing was wrapped, now it is whole"),
        (open(&files, true), wrapped(10), 1, "the weights of its sources were none, now they are 1, 2.5, 0.7"),
        (of(0.2), wrapped(10), 1, "validation_split was 0.1, now it is 0.2"),
        (of(0.1000000001), wrapped(10), 1, "validation_split was 0.1, now it is 0.1000000001"),
        (files.open(&two, 0.1).unwrap(), wrapped(10), 1, "there were 1 sources, now there are 2"),
        (templated, wrapped(10), 1, "the chat template is another one"),
        (pairs, wrapped(10), 1, "it is tokenized with another tokenizer, or one whose files have changed"),
    ] {
        let error = seek(dataset, shape, seed, &position);
        assert_eq!(error, format!("the data changed since the checkpoint: {expected}"));
    }
    position.streams[0].index = 1 << 60;
    let error = seek(same(), wrapped(10), 1, &position);
    assert!(error.contains("the position is sequence 1152921504606846976 of an epoch of "), "{error}");
    // `max_bytes` matters as far as it cuts.
    let within = |max_bytes| {
        let source = DataSource { max_bytes, ..files.source("a.txt") };
        files.open(&[source], 0.0).unwrap().train(wrapped(10), 1).unwrap()
    };
    let position = within(Some(150)).position();
    within(Some(150)).seek(&position).unwrap();
    for (max_bytes, now) in [(Some(75), 75), (Some(225), 225), (None, 250)] {
        let error = message(&within(max_bytes).seek(&position).unwrap_err());
        let expected = format!(
            "a.txt changed since the checkpoint: 150 of its bytes were taken, now {now}: set max_bytes as it was"
        );
        assert!(error.ends_with(&expected), "{error}");
    }
    within(Some(1000)).seek(&within(None).position()).unwrap();
}
