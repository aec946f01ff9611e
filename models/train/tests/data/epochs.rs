//! What an epoch is said to hold, against what is read in it.

use proptest::prelude::*;
use serde_json::json;
use train::data::EpochSize;
use train::{ChatTemplate, DataError, Message, SequenceShape, Tokenizer};

use crate::{Files, token_files, whole, wrapped};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

/// A text, or a conversation with an answer of this length.
fn line((is_chat, len): &(bool, usize)) -> String {
    let text = "a".repeat(*len);
    let line = match is_chat {
        true => json!({ "messages": [Message::new("user", "hi"), Message::new("assistant", text)] }),
        false => json!({ "text": text }),
    };
    format!("{line}\n")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Documents that are held out, and the end of the stream that may be, are counted with what they are held out from.
    #[test]
    fn an_epoch_is_what_is_read(
        lines in proptest::collection::vec((any::<bool>(), 1..60_usize), 2..40),
        fraction in 0.0..0.7,
        seq_len in 1..50_usize,
    ) {
        let files = Files::new([("a.jsonl", lines.iter().map(line).collect::<String>())]);
        let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
        let open = || files.open_with(&files.sources(), fraction, &Tokenizer::bytes(), Some(&template)).unwrap();
        let dataset = open();
        let tokens = dataset.size().train_tokens;
        prop_assume!(tokens > 1);
        if tokens <= seq_len as u64 {
            let refused = dataset.train(wrapped(seq_len), 0).err();
            prop_assert!(matches!(refused, Some(DataError::TooFewTokens { sequences: 0, .. })), "{:?}", refused);
            return Ok(());
        }
        // All of it in one sequence. Its first token is no target of the sequence, but counts as one where all do.
        let all = dataset.train(wrapped(tokens as usize - 1), 0).unwrap().next().unwrap().unwrap();
        let mut bounds = all.document_starts.clone();
        bounds.push(tokens as usize);
        let first = u64::from(all.tokens[0] == 256);
        let expected = EpochSize {
            sequences: (tokens - 1).div_ceil(seq_len as u64),
            tokens,
            documents: Some(all.document_starts.len() as u64),
            targets: Some(all.loss_mask.map_or(tokens, |mask| first + mask.iter().filter(|counts| **counts).count() as u64)),
            cut: 0,
        };
        prop_assert_eq!(dataset.train(wrapped(seq_len), 0).unwrap().epoch_size(), expected);
        for dataset in [dataset, open()] {
            let sequences = dataset.train(whole(seq_len), 0).unwrap();
            let cut = bounds.windows(2).filter(|bounds| bounds[1] - bounds[0] > seq_len + 1).count() as u64;
            let sequence_count = sequences.sequences_per_epoch()[0];
            prop_assert_eq!(sequences.epoch_size(), EpochSize { sequences: sequence_count, cut, ..expected });
        }
    }
}

/// Token files have no list of documents.
#[test]
fn an_epoch_of_token_files() {
    let tokens: Vec<u32> = [256].into_iter().chain(0..20).chain([256]).chain(0..5).collect();
    let files = Files::new([("a.bin", token_files::token_file((20240520, 1, 2), &tokens))]);
    let size = |shape: SequenceShape| files.all().train(shape, 0).unwrap().epoch_size();
    let expected = EpochSize { sequences: 3, tokens: 27, documents: None, targets: Some(27), cut: 0 };
    assert_eq!(size(wrapped(9)), expected);
    assert_eq!(size(whole(9)), EpochSize { cut: 1, ..expected });
}
