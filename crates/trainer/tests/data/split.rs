//! Compares the validation documents with a reference implementation for documents in memory.

use crate::*;
use proptest::prelude::*;
use trainer::rng::Rng;

fn split(documents: &[Vec<u32>], fraction: f64) -> (Vec<u32>, Vec<u32>) {
    let (mut train, mut held_out): (Vec<u32>, Vec<u32>) = (vec![], vec![]);
    for document in documents {
        let total = train.len() + held_out.len() + document.len();
        let behind = fraction * total as f64 - held_out.len() as f64;
        if document.len() as f64 <= behind { &mut held_out } else { &mut train }.extend(document);
    }
    let wanted = (fraction * (train.len() + held_out.len()) as f64) as usize;
    if held_out.len() * 2 < wanted {
        let tail = train.split_off(train.len() - (wanted - held_out.len()));
        held_out.extend(tail);
    }
    (train, held_out)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn documents_are_dealt_to_two_streams(lens in proptest::collection::vec(1..60_usize, 1..40), fraction in 0.0..0.9, seed: u64) {
        let mut rng = Rng::new(seed);
        let texts: Vec<String> = lens.iter().map(|len| noise(&mut rng, *len)).collect();
        let lines: String = texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
        let files = Files::new([("a.jsonl", lines)]);
        let dataset = files.open(&files.sources(), fraction).unwrap();
        let all: Vec<_> = texts.iter().map(|text| documents([text])).collect();
        let (train, held_out) = split(&all, fraction);
        prop_assert_eq!(dataset.size().train_tokens, train.len() as u64);
        if train.len() > 1 {
            let (tokens, starts) = stream(&dataset);
            // Every document begins with BOS, and no other token is BOS.
            let expected: Vec<usize> = (0..train.len()).filter(|i| train[*i] == 256).collect();
            prop_assert_eq!((tokens, starts), (train, expected));
        }
        if held_out.len() > 1 {
            let sequence = dataset.held_out(wrapped(held_out.len() - 1), 1).unwrap().remove(0);
            // The rest of a cut document begins where it is cut.
            let cuts = sequence.document_starts.iter().filter(|start| held_out[**start] != 256).count();
            let begins = (0..held_out.len()).filter(|i| held_out[*i] == 256).count();
            prop_assert!(cuts <= 1 && sequence.document_starts.len() == begins + cuts);
            prop_assert_eq!(sequence.tokens, held_out);
        }
    }
}

/// Sequences at even distances over the validation part, always the same ones. Each begins with the
/// last token of the previous one.
#[test]
fn held_out_sequences_are_at_even_distances() {
    let files = Files::new([("a", noise(&mut Rng::new(5), 2000))]);
    let dataset = files.open(&files.sources(), 0.5).unwrap();
    let stream = held_out_stream(&dataset);
    assert_eq!(stream.len(), 1000);
    let windows: Vec<_> = (0..100).map(|i| &stream[10 * i..stream.len().min(10 * i + 11)]).collect();
    let all = dataset.held_out(wrapped(10), usize::MAX).unwrap();
    assert!(all.iter().map(|sequence| &sequence.tokens[..sequence.num_tokens]).eq(windows.iter().copied()));
    let some = dataset.held_out(wrapped(10), 4).unwrap();
    let places = [0, 25, 50, 75];
    assert!(some.iter().map(|sequence| &sequence.tokens[..]).eq(places.map(|place| windows[place])));
    // A batch need not be full.
    let shape = SequenceShape { batch_size: 8, ..wrapped(10) };
    assert_eq!([0, 7, 8, 20, 1000].map(|count| dataset.held_out(shape, count).unwrap().len()), [0, 7, 8, 20, 100]);
}

/// Conversations of four sequences each. Only the last sequence has a target.
#[test]
fn held_out_batches_are_of_sequences_with_targets() {
    let line = |i: usize| {
        let messages = [Message::new("user", format!("{i:04}{}", "q".repeat(196))), Message::new("assistant", "nnnnn")];
        serde_json::json!({ "messages": messages }).to_string()
    };
    let files = Files::new([("chat.jsonl", (0..300).map(line).collect::<Vec<_>>().join("\n"))]);
    let dataset = files.open_with(&files.sources(), 0.1, &Tokenizer::bytes(), Some(&template(""))).unwrap();
    for wanted in [1, 2, 3, 60] {
        let shape = SequenceShape { packing: None, batch_size: 8, ..wrapped(64) };
        let batches = held_out_batches(&dataset, shape, AttnMaskType::Causal, wanted).unwrap();
        let sequences: usize = batches.iter().map(Batch::batch_size).sum();
        assert_eq!(sequences, 30.min(wanted * 8));
        assert_eq!(batches.iter().map(Batch::num_targets).sum::<usize>(), 6 * sequences);
    }
}
