//! Windows of the stream and whole documents: every target once, boundaries where documents begin,
//! no loss on padding.

use crate::*;
use proptest::prelude::*;
use trainer::rng::Rng;

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

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// The sequences themselves are pinned in `digests`.
    #[test]
    fn every_target_is_in_one_sequence(lens in proptest::collection::vec(1..40_usize, 1..20), seq_len in 1..30_usize, seed: u64) {
        let mut rng = Rng::new(seed);
        let texts: Vec<String> = lens.iter().map(|len| noise(&mut rng, *len)).collect();
        let dataset = Files::new([("a.jsonl", lines(&texts))]).all();
        let documents: Vec<_> = texts.iter().map(|text| documents([text])).collect();
        let sequences = epoch(&dataset, whole(seq_len)).unwrap();
        sequences.iter().for_each(|sequence| check(sequence, seq_len));
        // Every token except the first of a document is a target in that document, in one sequence.
        let ends: Vec<_> = documents.iter().map(|document| document.last_chunk::<2>().unwrap()).collect();
        let has = |sequence: &Sequence, end: &[u32; 2]| sequence.tokens[..sequence.num_tokens].windows(2).any(|pair| pair == end);
        prop_assert!(ends.iter().all(|end| sequences.iter().any(|sequence| has(sequence, end))));
        let targets = sequences.iter().map(|s| (1..s.num_tokens).filter(|t| !s.document_starts.contains(t)).count());
        prop_assert_eq!(targets.sum::<usize>(), lens.iter().sum::<usize>());
        let all = documents.concat();
        prop_assume!(all.len() > seq_len);
        // Text is wrapped by default: each window begins with the last token of the one before.
        let sequences = epoch(&dataset, by_default(seq_len)).unwrap();
        sequences.iter().for_each(|sequence| check(sequence, seq_len));
        prop_assert_eq!(sequences.len(), (all.len() - 1).div_ceil(seq_len));
        let tokens = sequences.iter().map(|sequence| sequence.num_tokens - 1);
        prop_assert_eq!(tokens.sum::<usize>(), all.len() - 1);
    }
}

/// Long questions and short answers: an epoch has the sequences with answers, and the next epoch
/// has them again.
#[test]
fn sequences_without_targets_are_left_out() {
    let lines = (0..24).map(|i| {
        let messages = [Message::new("user", " the".repeat(3000)), Message::new("assistant", format!("an I{i}."))];
        format!("{}\n", json!({ "messages": messages }))
    });
    let files = Files::new([("a.jsonl", lines.collect::<String>())]);
    let open =
        |fraction| files.open_with(&files.sources(), fraction, &Tokenizer::bytes(), Some(&template(""))).unwrap();
    let dataset = open(0.0);
    for shape in [whole(64), wrapped(64)] {
        let mut sequences = dataset.train(shape, 0).unwrap();
        let EpochSize { sequences: count, without_targets, targets, .. } = sequences.epoch_size();
        assert!((24..=48).contains(&count) && without_targets > 1000, "{count}, {without_targets}");
        let mut epoch = || -> Vec<Sequence> {
            let mut epoch = crate::take(&mut sequences, count as usize);
            epoch.sort_by_key(|sequence| sequence.tokens.clone());
            epoch
        };
        let (first, second) = (epoch(), epoch());
        assert_eq!(first, second);
        let counted = first.iter().flat_map(|sequence| sequence.loss_mask.iter().flatten());
        assert_eq!(counted.filter(|counts| **counts).count() as u64, targets);
    }
    // A batch at the end of an epoch also has sequences of the next one.
    let shape = SequenceShape { batch_size: 7, ..whole(64) };
    let mut batches = TrainBatches::new(&dataset, shape, AttnMaskType::Causal, 0).unwrap();
    let epoch = batches.sequences_per_epoch()[0];
    while batches.epochs() == Some(0) {
        batches.next_batch().unwrap();
    }
    assert_eq!(batches.of_epoch(), epoch.next_multiple_of(7) - epoch);
    let held_out = open(0.5).held_out(whole(64), 5).unwrap();
    assert!(held_out.len() == 5 && held_out.iter().all(|s| s.loss_mask.as_ref().unwrap().contains(&true)));
}
