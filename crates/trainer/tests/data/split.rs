//! The validation part: which documents it has, and its sequences and batches.

use crate::*;
use trainer::rng::Rng;

/// A document is held out if the part is behind its share by the document's length. If the part has
/// less than half of its share in the end, the end of the text is cut off. `digests` has larger data.
#[test]
fn documents_are_dealt_to_two_streams() {
    for (texts, fraction, held_out) in [
        (&["aa", "bbbb", "cc", "dddd", "ee"][..], 0.4, documents(["cc", "ee"])),
        (&["aa", "b", "c"], 0.5, documents(["b"])),
        // Behind by exactly the length.
        (&["a", "b", "cc"], 0.5, documents(["b"])),
        (&["aaaaaaaaaaaaaaaaaaa"], 0.2, documents(["aaaaaaaaaaaaaaaaaaa"])[16..].to_vec()),
        (&["aa", "bb"], 0.0, vec![]),
    ] {
        let files = Files::new([("a.jsonl", lines(texts))]);
        let dataset = files.open(&files.sources(), fraction).unwrap();
        assert_eq!(held_out_stream(&dataset), held_out, "{texts:?}");
        let (tokens, starts) = stream(&dataset);
        assert_eq!(tokens.len() + held_out.len(), documents(texts).len());
        let begins: Vec<_> = (0..tokens.len()).filter(|i| tokens[*i] == 256).collect();
        assert_eq!(starts, begins, "{texts:?}");
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
        json!({ "messages": messages }).to_string()
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
