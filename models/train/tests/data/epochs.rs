//! Compares the reported size of an epoch with the sequences read in it.

use proptest::prelude::*;
use serde_json::json;
use train::batches::{AttnMaskType, TrainBatches};
use train::data::EpochSize;
use train::{ChatTemplate, Message, Sequence, SequenceShape, Tokenizer};

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

    /// A document whose end is held out counts in the training part.
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
        // The whole stream in one sequence. Its first token is not a target of the sequence, but
        // counts as one without a mask. The stream may be only the beginning of a conversation.
        let all = match dataset.train(wrapped(tokens as usize - 1), 0) {
            Err(error) if error.to_string().contains("counts for the loss") => return Ok(()),
            all => all.unwrap().next().unwrap().unwrap(),
        };
        let mut bounds = all.document_starts.clone();
        bounds.push(tokens as usize);
        let first = u64::from(all.tokens[0] == 256);
        let mask = all.loss_mask.clone().unwrap_or_else(|| vec![true; tokens as usize - 1]);
        let windows = mask.chunks(seq_len);
        let (learned, left): (Vec<_>, Vec<_>) = { windows }.enumerate().partition(|(_, mask)| mask.contains(&true));
        // The last window may be shorter, and is not enough for a batch.
        if learned.iter().all(|(_, mask)| mask.len() < seq_len) {
            let refused = dataset.train(wrapped(seq_len), 0).err().unwrap().to_string();
            prop_assert!(refused.contains("which make 0 sequences"), "{}", refused);
            return Ok(());
        }
        // The last token of a window is the first one of the next window.
        let is_lonely = |i: usize| i == 0 || left.iter().any(|(other, _)| *other + 1 == i);
        let expected = EpochSize {
            sequences: learned.len() as u64,
            without_targets: left.len() as u64,
            tokens: learned.iter().map(|(i, mask)| mask.len() + usize::from(is_lonely(*i))).sum::<usize>() as u64,
            documents: Some(all.document_starts.len() as u64),
            targets: Some(all.loss_mask.map_or(tokens, |mask| first + mask.iter().filter(|counts| **counts).count() as u64)),
            cut: 0,
        };
        prop_assert_eq!(dataset.train(wrapped(seq_len), 0).unwrap().epoch_size(), expected);
        for dataset in [dataset, open()] {
            let sequences = dataset.train(whole(seq_len), 0).unwrap();
            let cut = bounds.windows(2).filter(|bounds| bounds[1] - bounds[0] > seq_len + 1).count() as u64;
            let sequences_per_epoch = sequences.sequences_per_epoch()[0];
            let size = sequences.epoch_size();
            let read = sequences.take(sequences_per_epoch as usize).collect::<Result<Vec<_>, _>>().unwrap();
            let targets = |s: &Sequence| s.loss_mask.as_ref().map_or(seq_len, |mask| mask.iter().filter(|counts| **counts).count());
            prop_assert!(read.iter().all(|sequence| targets(sequence) > 0));
            let EpochSize { without_targets, tokens, .. } = size;
            prop_assert!(tokens <= dataset.size().train_tokens && (without_targets > 0 || tokens == dataset.size().train_tokens));
            let expected = EpochSize { sequences: sequences_per_epoch, without_targets, tokens, cut, ..expected };
            prop_assert_eq!(size, expected);
        }
    }
}

/// Token files do not list documents.
#[test]
fn an_epoch_of_token_files() {
    let tokens: Vec<u32> = [256].into_iter().chain(0..20).chain([256]).chain(0..5).collect();
    let files = Files::new([("a.bin", token_files::token_file((20240520, 1, 2), &tokens))]);
    let size = |shape: SequenceShape| files.all().train(shape, 0).unwrap().epoch_size();
    let expected = EpochSize { sequences: 3, tokens: 27, targets: Some(27), ..EpochSize::default() };
    assert_eq!(size(wrapped(9)), expected);
    assert_eq!(size(whole(9)), EpochSize { cut: 1, ..expected });
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
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    let dataset = files.open_with(&files.sources(), 0.0, &Tokenizer::bytes(), Some(&template)).unwrap();
    for shape in [whole(64), wrapped(64)] {
        let mut sequences = dataset.train(shape, 0).unwrap();
        let EpochSize { sequences: count, without_targets, targets, .. } = sequences.epoch_size();
        assert!((24..=48).contains(&count) && without_targets > 1000, "{count}, {without_targets}");
        let mut epoch = || -> Vec<Sequence> {
            let sequences = sequences.by_ref().take(count as usize);
            let mut epoch: Vec<_> = sequences.collect::<Result<_, _>>().unwrap();
            epoch.sort_by_key(|sequence| sequence.tokens.clone());
            epoch
        };
        let (first, second) = (epoch(), epoch());
        assert_eq!(first, second);
        let counted = first.iter().flat_map(|sequence| sequence.loss_mask.iter().flatten());
        assert_eq!(counted.filter(|counts| **counts).count() as u64, targets.unwrap());
    }
    // A batch at the end of an epoch also has sequences of the next one.
    let shape = SequenceShape { batch_size: 7, ..whole(64) };
    let mut batches = TrainBatches::new(&dataset, shape, AttnMaskType::Causal, 0).unwrap();
    let epoch = batches.sequences_per_epoch()[0];
    while batches.epochs() == Some(0) {
        batches.next_batch().unwrap();
    }
    assert_eq!(batches.of_epoch(), epoch.next_multiple_of(7) - epoch);
    let halved = files.open_with(&files.sources(), 0.5, &Tokenizer::bytes(), Some(&template)).unwrap();
    let held_out = halved.held_out(whole(64), 5).unwrap();
    assert!(held_out.len() == 5 && held_out.iter().all(|s| s.loss_mask.as_ref().unwrap().contains(&true)));
}
