//! Windows of the stream and whole documents: every target once, boundaries where documents begin,
//! no loss on padding.

use proptest::prelude::*;
use train::rng::Rng;
use train::{Packing, Sequence, SequenceShape};

use crate::{Files, documents, epoch, noise, stream, whole, wrapped};

/// Documents of random letters, one per line, and their tokens.
fn random_documents(lens: &[usize], seed: u64) -> (Files, Vec<Vec<u32>>) {
    let mut rng = Rng::new(seed);
    let texts: Vec<String> = lens.iter().map(|len| noise(&mut rng, *len)).collect();
    let lines: String = texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    (Files::new([("a.jsonl", lines)]), texts.iter().map(|text| documents([text])).collect())
}

/// Checks the invariants of a sequence.
fn check(sequence: &Sequence, seq_len: usize) {
    let Sequence { tokens, loss_mask, document_starts, num_tokens } = sequence;
    assert_eq!(tokens.len(), seq_len + 1);
    assert!((1..=seq_len + 1).contains(num_tokens));
    // Every document begins with BOS, and no other token is BOS. Without EOS, padding is BOS too.
    let begins: Vec<usize> = (0..*num_tokens).filter(|place| tokens[*place] == 256).collect();
    assert_eq!(document_starts, &begins);
    match loss_mask {
        None => assert_eq!(*num_tokens, seq_len + 1),
        Some(mask) => {
            let expected: Vec<bool> = (1..=seq_len).map(|target| target < *num_tokens).collect();
            assert_eq!(mask, &expected);
        }
    }
}

fn without_padding(sequences: &[Sequence]) -> Vec<Vec<u32>> {
    let mut parts: Vec<_> = sequences.iter().map(|sequence| sequence.tokens[..sequence.num_tokens].to_vec()).collect();
    parts.sort();
    parts
}

/// Next-fit by definition, for documents in memory.
fn next_fit(documents: &[Vec<u32>], len: usize) -> Vec<Vec<u32>> {
    let mut sequences: Vec<Vec<u32>> = vec![];
    let mut open: Vec<u32> = vec![];
    for document in documents {
        if open.len() + document.len() <= len {
            open.extend(document);
            continue;
        }
        sequences.extend((!open.is_empty()).then_some(open));
        let mut rest = &document[..];
        while rest.len() > len {
            sequences.push(rest[..len].to_vec());
            rest = &rest[len - 1..];
        }
        open = rest.to_vec();
    }
    sequences.extend((!open.is_empty()).then_some(open));
    sequences.sort();
    sequences
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_target_is_in_one_window(lens in proptest::collection::vec(1..40_usize, 1..20), seq_len in 1..30_usize, seed: u64) {
        let (files, documents) = random_documents(&lens, seed);
        let all = documents.concat();
        prop_assume!(all.len() > seq_len);
        let sequences = epoch(&files.all(), wrapped(seq_len)).unwrap();
        sequences.iter().for_each(|sequence| check(sequence, seq_len));
        let mut windows: Vec<_> =
            (0..all.len() - 1).step_by(seq_len).map(|begin| all[begin..all.len().min(begin + seq_len + 1)].to_vec()).collect();
        prop_assert_eq!(windows.iter().map(|window| window.len() - 1).sum::<usize>(), all.len() - 1);
        windows.sort();
        prop_assert_eq!(without_padding(&sequences), windows);
    }

    #[test]
    fn documents_stay_whole(lens in proptest::collection::vec(1..40_usize, 1..20), seq_len in 1..30_usize, seed: u64) {
        let (files, documents) = random_documents(&lens, seed);
        let sequences = epoch(&files.all(), whole(seq_len)).unwrap();
        sequences.iter().for_each(|sequence| check(sequence, seq_len));
        prop_assert_eq!(without_padding(&sequences), next_fit(&documents, seq_len + 1));
        // Every token except the first of a document is a target in that document.
        let targets = sequences.iter().map(|s| (1..s.num_tokens).filter(|t| !s.document_starts.contains(t)).count());
        prop_assert_eq!(targets.sum::<usize>(), lens.iter().sum::<usize>());
    }
}

/// The target at a boundary is predicted from the end of another document.
#[test]
fn boundaries() {
    let files = Files::new([("a", "xy"), ("b", "z")]);
    let sequences = epoch(&files.all(), wrapped(3)).unwrap();
    let first = sequences.iter().find(|sequence| sequence.tokens[1] == 'x' as u32).unwrap();
    assert_eq!((&first.tokens[..], &first.document_starts[..]), (&[256, 120, 121, 256][..], &[0, 3][..]));
    assert_eq!(first.loss_mask, None);
    let second = sequences.iter().find(|sequence| sequence.tokens[1] == 'z' as u32).unwrap();
    assert_eq!((&second.tokens[..], &second.document_starts[..]), (&[256, 122, 256, 256][..], &[0][..]));
    assert_eq!((second.num_tokens, second.loss_mask.as_deref()), (2, Some(&[true, false, false][..])));
}

#[test]
fn a_document_longer_than_a_sequence_is_cut() {
    let files = Files::new([("a", "0123456789")]);
    let sequences = epoch(&files.all(), whole(4)).unwrap();
    let all = documents(["0123456789"]);
    assert_eq!(without_padding(&sequences), [&all[4..9], &all[8..11], &all[..5]]);
    let starts: Vec<_> = sequences.iter().filter(|sequence| !sequence.document_starts.is_empty()).collect();
    assert_eq!(starts.len(), 1);
}

/// Held-out documents stay whole too.
#[test]
fn held_out_documents_stay_whole() {
    let (files, _) = random_documents(&[9; 40], 1);
    let dataset = files.open(&files.sources(), 0.25).unwrap();
    let sequences = dataset.held_out(whole(24), usize::MAX).unwrap();
    assert_eq!(sequences.len(), 5);
    for sequence in &sequences {
        check(sequence, 24);
        assert_eq!(sequence.document_starts, [0, 10]);
    }
}

/// Sources without weights are mixed in proportion to their sizes.
#[test]
fn sources_without_weights_are_one() {
    let mut rng = Rng::new(2);
    let files = Files::new([("a", noise(&mut rng, 99)), ("b", noise(&mut rng, 299))]);
    let sources = [files.source("a"), files.source("b")];
    let dataset = files.open(&sources, 0.0).unwrap();
    let sequences = dataset.train(wrapped(10), 3).unwrap();
    assert_eq!(sequences.sequences_per_epoch(), [10 + 30]);
    let alone = sources.map(|source| epoch(&files.open(&[source], 0.0).unwrap(), wrapped(10)).unwrap());
    assert_eq!(without_padding(&epoch(&dataset, wrapped(10)).unwrap()), without_padding(&alone.concat()));
}

/// A shape without a packing wraps text.
#[test]
fn text_is_wrapped_by_default() {
    let (files, documents) = random_documents(&[9, 9, 9], 1);
    let dataset = files.all();
    let shape = SequenceShape { packing: None, ..whole(14) };
    assert_eq!(epoch(&dataset, shape).unwrap(), epoch(&dataset, wrapped(14)).unwrap());
    assert_ne!(epoch(&dataset, shape).unwrap(), epoch(&dataset, whole(14)).unwrap());
    assert_eq!(stream(&dataset).0, documents.concat());
    let packing: Packing = serde_json::from_str("\"whole\"").unwrap();
    assert_eq!(packing, Packing::Whole);
}
