//! Sources with weights: each has its share and its epochs, and the order is always the same.

use train::rng::Rng;
use train::{DataSource, Dataset, Sequence};

use crate::{Files, message, noise, take, wrapped};

const WEIGHTS: [f64; 3] = [5.0, 3.0, 2.0];

/// Three sources of different sizes: lower case letters, upper case letters and digits.
fn sources() -> (Files, Vec<DataSource>) {
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
        Some('0'..='9') => 2,
        other => panic!("{other:?} is in no source"),
    }
}

fn dataset() -> (Files, Dataset) {
    let (files, sources) = sources();
    let dataset = files.open(&sources, 0.0).unwrap();
    (files, dataset)
}

/// A source is never more than one sequence from its share, however often its epochs restart.
#[test]
fn shares_are_kept_at_any_time() {
    let (_files, dataset) = dataset();
    let mut sequences = dataset.train(wrapped(10), 1).unwrap();
    assert_eq!(sequences.sequences_per_epoch(), [40, 7, 15]);
    let mut counts = [0.0; 3];
    for taken in 1..=500 {
        counts[source_of(&take(&mut sequences, 1)[0])] += 1.0;
        for (count, weight) in counts.iter().zip(WEIGHTS) {
            let share = f64::from(taken) * weight / 10.0;
            assert!((count - share).abs() <= 1.0, "{counts:?} of {taken}");
        }
    }
    assert_eq!(counts, [250.0, 150.0, 100.0]);
    assert_eq!(sequences.taken(), 500);
    let epochs: Vec<u64> = sequences.position().streams.iter().map(|stream| stream.epoch).collect();
    assert_eq!(epochs, [250 / 40, 150 / 7, 100 / 15]);
}

#[test]
fn each_source_has_its_own_epochs() {
    let (_files, dataset) = dataset();
    let all = take(&mut dataset.train(wrapped(10), 1).unwrap(), 500);
    for (source, count) in [40, 7, 15].into_iter().enumerate() {
        let own: Vec<&Sequence> = all.iter().filter(|sequence| source_of(sequence) == source).collect();
        let sorted = |epoch: &[&Sequence]| {
            let mut tokens: Vec<_> = epoch.iter().map(|sequence| sequence.tokens.clone()).collect();
            tokens.sort();
            tokens
        };
        let epochs: Vec<_> = own.chunks_exact(count).collect();
        assert!(epochs.len() > 5);
        for epoch in &epochs {
            assert_eq!(sorted(epoch), sorted(epochs[0]));
        }
        assert!(epochs[0] != epochs[1]);
    }
}

#[test]
fn only_the_proportions_of_weights_count() {
    let (files, mut sources) = sources();
    let taken =
        |sources: &[DataSource]| take(&mut files.open(sources, 0.0).unwrap().train(wrapped(10), 1).unwrap(), 100);
    let before = taken(&sources);
    sources.iter_mut().for_each(|source| source.weight = source.weight.map(|weight| weight * 4.0));
    assert_eq!(taken(&sources), before);
    sources[0].weight = Some(1.0);
    assert_ne!(taken(&sources), before);
}

#[test]
fn weights_that_cannot_be_used() {
    let (files, sources) = sources();
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut sources = sources.clone();
        sources[1].weight = Some(weight);
        let error = message(&files.open(&sources, 0.0).unwrap_err());
        let expected =
            format!("weight = {weight} of {}: weights must be positive and finite", files.path("b").display());
        assert_eq!(error, expected);
    }
    let mut sources = sources;
    sources[2].weight = None;
    let error = message(&files.open(&sources, 0.0).unwrap_err());
    assert!(error.starts_with(&format!("no weight of {}", files.path("c").display())), "{error}");
}

/// A source without training data has no share.
#[test]
fn a_source_without_a_target() {
    let (files, mut sources) = sources();
    files.write("tiny.jsonl", "\n");
    sources.push(DataSource { weight: Some(1.0), ..files.source("tiny.jsonl") });
    let error = message(&files.open(&sources, 0.0).unwrap().train(wrapped(10), 1).unwrap_err());
    let expected = format!("nothing to train on in {}, which has a weight:", files.path("tiny.jsonl").display());
    assert!(error.starts_with(&expected), "{error}");
}

/// The source that is furthest behind its share comes next, or the first of several.
#[test]
fn the_order_of_sources_is_fixed() {
    let (_files, dataset) = dataset();
    let order: Vec<_> = take(&mut dataset.train(wrapped(10), 1).unwrap(), 20).iter().map(source_of).collect();
    assert_eq!(order, [0, 1, 2, 0, 0, 1, 0, 2, 1, 0].repeat(2));
}
