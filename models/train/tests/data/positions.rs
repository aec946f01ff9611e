//! From any position the rest equals an uninterrupted run. A position in other data is refused.

use std::fs;

use proptest::prelude::*;
use train::rng::Rng;
use train::{ChatTemplate, DataSource, Dataset, Message, Packing, Position, Sequence, SequenceShape, Tokenizer};

use crate::token_files::{LLAMA_3, token_file};
use crate::{Files, message, noise, take, whole, wrapped};

fn files() -> Files {
    let mut rng = Rng::new(11);
    let lines: String = (0..30).map(|i| format!("{{\"text\": \"{}\"}}\n", noise(&mut rng, 5 + i))).collect();
    let tokens: Vec<u32> = (0..300).map(|_| rng.below(256) as u32).collect();
    let files = Files::new([("a.txt", noise(&mut rng, 250)), ("b.jsonl", lines)]);
    files.write("c.bin", token_file(LLAMA_3, &tokens));
    files
}

/// All files as one source, or each as a source with a weight.
fn open(files: &Files, is_mixture: bool) -> Dataset {
    let weighted = |(name, weight)| DataSource { weight: Some(weight), ..files.source(name) };
    let sources = match is_mixture {
        true => [("a.txt", 1.0), ("b.jsonl", 2.5), ("c.bin", 0.7)].map(weighted).to_vec(),
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

/// Displayed position: the document and the offset at which the next sequence begins.
#[test]
fn a_position_names_the_document() {
    let files = Files::new([("a.jsonl", "{\"text\": \"0123456789\"}\n".repeat(20))]);
    let mut sequences = files.all().train(wrapped(4), 3).unwrap();
    let mut places = vec![];
    for _ in 0..55 {
        let next = sequences.position().streams.remove(0).next;
        let sequence = &take(&mut sequences, 1)[0];
        let expected = if next.offset == 0 { 256 } else { u32::from(b'0') + next.offset as u32 - 1 };
        assert_eq!(sequence.tokens[0], expected);
        assert_eq!(next.source, 0);
        places.push(next.document.unwrap() * 11 + next.offset);
    }
    places.sort();
    assert_eq!(places, (0..55).map(|i| i * 4).collect::<Vec<_>>());
}

/// Error of a position in data opened after `change`.
fn refused(change: impl FnOnce(&Files)) -> String {
    let files = files();
    let mut before = open(&files, false).train(wrapped(10), 1).unwrap();
    take(&mut before, 5);
    let position = before.position();
    change(&files);
    message(&open(&files, false).train(wrapped(10), 1).unwrap().seek(&position).unwrap_err())
}

#[test]
fn a_changed_file_is_named() {
    let error = refused(|files| fs::write(files.path("a.txt"), "shorter, but long enough for a sequence").unwrap());
    assert!(error.ends_with("a.txt changed since the checkpoint: it had 250 bytes, now it has 39"), "{error}");
    let error = refused(|files| {
        let text = fs::read_to_string(files.path("b.jsonl")).unwrap();
        let changed = text.replacen("\": \"", "\": \"X", 1).replacen("\"}", "", 0);
        let at = changed.find('X').unwrap();
        fs::write(files.path("b.jsonl"), format!("{}{}", &changed[..=at], &changed[at + 2..])).unwrap();
    });
    assert!(error.ends_with("b.jsonl changed since the checkpoint: it has the same size but other content"), "{error}");
    let error = refused(|files| {
        let mut bytes = fs::read(files.path("c.bin")).unwrap();
        bytes[1024 + 400] ^= 1;
        fs::write(files.path("c.bin"), bytes).unwrap();
    });
    assert!(error.ends_with("c.bin changed since the checkpoint: it has the same size but other content"), "{error}");
    let error = refused(|files| fs::remove_file(files.path("a.txt")).unwrap());
    assert!(
        error.ends_with("a.txt changed since the checkpoint: it is no longer there, or it is left out now"),
        "{error}"
    );
    let error = refused(|files| files.write("new.txt", "one more"));
    assert!(error.ends_with("new.txt changed since the checkpoint: it was not there then"), "{error}");
}

#[test]
fn a_changed_max_bytes_is_named() {
    let files = Files::new([("a.txt", "a line of text\n".repeat(20))]);
    let within = |max_bytes| files.open(&[DataSource { max_bytes, ..files.source("a.txt") }], 0.0).unwrap();
    let position = within(Some(150)).train(wrapped(10), 1).unwrap().position();
    let seek = |max_bytes| within(max_bytes).train(wrapped(10), 1).unwrap().seek(&position);
    seek(Some(150)).unwrap();
    for (max_bytes, now) in [(Some(75), 75), (Some(225), 225), (None, 300)] {
        let error = message(&seek(max_bytes).unwrap_err());
        let expected = format!(
            "a.txt changed since the checkpoint: 150 of its bytes were taken, now {now}: set max_bytes as it was"
        );
        assert!(error.ends_with(&expected), "{error}");
    }
    // A limit larger than the data has no effect.
    let position = within(None).train(wrapped(10), 1).unwrap().position();
    within(Some(1000)).train(wrapped(10), 1).unwrap().seek(&position).unwrap();
}

/// The size of a position does not grow with the number of files.
#[test]
fn one_of_many_files_has_changed() {
    let files = Files::new((0..1001).map(|i| (i.to_string(), "text")));
    let position = files.all().train(wrapped(10), 1).unwrap().position();
    let source = &position.streams[0].sources[0];
    assert_eq!((source.num_files, source.files.len()), (1001, 0));
    files.all().train(wrapped(10), 1).unwrap().seek(&position).unwrap();
    let error = |files: &Files| message(&files.all().train(wrapped(10), 1).unwrap().seek(&position).unwrap_err());
    files.write("7", "TEXT");
    let expected = "the data changed since the checkpoint: one or more of the files have other content";
    assert!(error(&files).starts_with(expected), "{}", error(&files));
    files.write("new", "text");
    assert_eq!(error(&files), "the data changed since the checkpoint: there were 1001 files, now there are 1002");
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
    let position = open(&files, false).train(wrapped(10), 1).unwrap().position();
    let error = |dataset: Dataset, shape: SequenceShape, seed| {
        message(&dataset.train(shape, seed).unwrap().seek(&position).unwrap_err())
    };
    let same = || open(&files, false);
    let begins = |error: String, expected: &str| {
        assert_eq!(error, format!("the data changed since the checkpoint: {expected}"));
    };
    begins(error(same(), wrapped(10), 2), "its seed was 1, now it is 2");
    begins(error(same(), wrapped(11), 1), "seq_len was 10, now it is 11");
    begins(error(same(), whole(10), 1), "packing was wrapped, now it is whole");
    begins(error(open(&files, true), wrapped(10), 1), "the weights of its sources were none, now they are 1, 2.5, 0.7");
    let other = files.open(&files.sources(), 0.2).unwrap();
    begins(error(other, wrapped(10), 1), "held_out_fraction was 0.1, now it is 0.2");
    let nearly = files.open(&files.sources(), 0.1000000001).unwrap();
    begins(error(nearly, wrapped(10), 1), "held_out_fraction was 0.1, now it is 0.1000000001");
    let two = [DataSource::new([files.path("a.txt")]), DataSource::new([files.path("b.jsonl"), files.path("c.bin")])];
    begins(error(files.open(&two, 0.1).unwrap(), wrapped(10), 1), "there were 1 sources, now there are 2");
    let source = DataSource { field: "messages".into(), ..files.sources().remove(0) };
    assert!(message(&files.open(&[source], 0.1).unwrap_err()).contains("neither `messages` nor `messages`"));
    let template = ChatTemplate::new("{{ messages }}", [("", ""); 0]).unwrap();
    let other = files.open_with(&files.sources(), 0.1, &bytes, Some(&template)).unwrap();
    begins(error(other, wrapped(10), 1), "the chat template is another one");
    // A vocabulary in which the ids of the token file exist.
    let other = files.open_with(&files.sources(), 0.1, &crate::folder_with_tokenizer(), None).unwrap();
    begins(error(other, wrapped(10), 1), "it is tokenized with another tokenizer, or one whose files have changed");
    let mut broken = position.clone();
    broken.streams[0].index = 1 << 60;
    let error = message(&same().train(wrapped(10), 1).unwrap().seek(&broken).unwrap_err());
    assert!(error.contains("the position is sequence 1152921504606846976 of an epoch of "), "{error}");
    assert_eq!(position.streams[0].sources[0].packing, Packing::Wrapped);
}

/// A resumed run sees the sequences that would have followed, and recognizes its data: both are
/// fixed.
#[test]
fn sequences_and_fingerprints_are_fixed() {
    let files = files();
    let mut rng = Rng::new(12);
    let chat = |i: usize| {
        let [question, answer] = [5 + i, 20 - i].map(|len| noise(&mut rng, len));
        let messages = [Message::new("user", question), Message::new("assistant", answer)];
        format!("{}\n", serde_json::json!({ "messages": messages, "tools": "[]" }))
    };
    files.write("d.jsonl", (0..15).map(chat).collect::<String>());
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = ChatTemplate::new(source, [("", ""); 0]).unwrap();
    let one =
        |names: &[&str]| DataSource { weight: Some(1.0), ..DataSource::new(names.iter().map(|name| files.path(name))) };
    let sources = [one(&["a.txt", "b.jsonl"]), one(&["c.bin"]), one(&["d.jsonl"]), one(&["b.jsonl", "c.bin", "a.txt"])];
    let dataset = files.open_with(&sources, 0.2, &Tokenizer::bytes(), Some(&template)).unwrap();
    let fold = |hash: u64, sequence: &Sequence| {
        format!("{sequence:?}").bytes().fold(hash, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()))
    };
    let seen = [wrapped(30), whole(30)].map(|shape| {
        let sequences = take(&mut dataset.train(shape, 5).unwrap(), 200);
        let held_out = dataset.held_out(shape, usize::MAX).unwrap();
        [sequences, held_out].map(|sequences| (sequences.len(), sequences.iter().fold(7, fold)))
    });
    let wrapped = [(200, 2667368044795665715), (19, 5749461891722381881)];
    assert_eq!(seen, [wrapped, [(200, 6872097532547744679), (21, 9689828962358579225)]]);
    let fingerprints = [
        "c7018ea161d2d39c708a46eb0e837378f7fbd582102d149c949f69caecddea75",
        "05afc7dbfd6c0e749770358d0e6881b3420200b14ea87e42f8b02adad1f9ad4e",
        "c9a2066855b7eb473ba09db5f407b22253d443d904e1d8f9d867a677f99c5f91",
        "49fe8396e54c8ebd9194c460b8cdd383497fda7e0132ce91e62981abe428ea6f",
    ];
    assert_eq!(dataset.fingerprints(), fingerprints.map(|line| format!("{line}\n")).concat());
}
