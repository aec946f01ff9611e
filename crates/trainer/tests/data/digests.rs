//! Sequences of each kind of data are fixed: ids, masks, documents and order over several epochs,
//! after a resume, and of the validation part.

use crate::*;

const TEMPLATE: &str = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{% for m in messages %}\
    <{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

/// Text with words, numbers, other scripts and line ends.
fn prose(rng: &mut Rng, len: usize) -> String {
    let words =
        ["the", " fox", " it's", "12345", " 7", ", ", "...", "\u{4e2d}\u{6587}", "  ", "\t", "e\u{301}", " \u{1f600}"];
    let mut text = String::new();
    while text.len() < len {
        match rng.below(40) {
            0 => text += ["\n", "\r\n", "\n\n", " \n "][rng.below(4)],
            1 => text += &"9".repeat(rng.below(40)),
            2 => text += &noise(rng, 300),
            _ => text += words[rng.below(words.len())],
        }
    }
    text
}

fn lines(rng: &mut Rng, count: usize) -> Vec<serde_json::Value> {
    (0..count).map(|i| json!({ "id": i, "text": prose(rng, 20 + 11 * (i % 37)) })).collect()
}

fn chat(rng: &mut Rng, i: usize) -> String {
    let said = |role: &str, rng: &mut Rng| {
        let len = 1 + rng.below(90);
        Message::new(role, prose(rng, len))
    };
    let messages: Vec<_> = ["user", "assistant", "user", "assistant"].iter().map(|role| said(role, rng)).collect();
    let tools = if i.is_multiple_of(3) { json!([{ "name": "add" }]) } else { json!(null) };
    format!("{}\n", json!({ "messages": messages, "tools": tools }))
}

/// One file or folder of each kind.
fn files() -> Files {
    let rng = &mut Rng::new(40);
    // Numbers of two kinds of files that are gone.
    (0..14_000).filter(|i| i % 97 != 13).for_each(|_| _ = rng.below(256));
    (0..14_000).filter(|i| i / 50 % 3 != 1).for_each(|_| _ = rng.below(9));
    let array: Vec<String> = lines(rng, 80).iter().map(|line| line.to_string()).collect();
    let files = Files::new([("array.json", format!("[{}\n]\n", array.join(",\n\n  ")))]);
    (0..40).for_each(|i| files.write(format!("folder/{i:02}.txt"), prose(rng, 50 + 20 * i)));
    files.write("large.txt", prose(rng, 400_000));
    files.write("line.jsonl", json!({ "text": prose(rng, 150_000).replace('\n', " ") }).to_string());
    files.write("lines.jsonl", lines(rng, 80).iter().map(|line| format!("{line}\r\n\n")).collect::<String>());
    files.write("chats.jsonl", (0..90).map(|i| chat(rng, i)).collect::<String>());
    #[cfg(feature = "parquet")]
    {
        let rows: Vec<String> = (0..90).map(|i| prose(rng, 5 * i + 1)).collect();
        files.write("rows.parquet", crate::parquet::of_texts(&rows));
    }
    files
}

fn digest<'a>(sequences: impl IntoIterator<Item = &'a Sequence>, also: &str) -> String {
    let mut hasher = Sha256::new();
    for sequence in sequences {
        hasher.update(format!("{sequence:?}\n"));
    }
    hasher.update(also);
    hasher.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Digests of 1000 training sequences and all validation ones, wrapped and whole.
fn digests(files: &Files, sources: &[DataSource], tokenizer: &Tokenizer, fraction: f64, seq_len: usize) -> [String; 2] {
    let template = ChatTemplate::new(TEMPLATE, [("", ""); 0]).unwrap();
    let open = || files.open_with(sources, fraction, tokenizer, Some(&template)).unwrap();
    let dataset = open();
    [wrapped(seq_len), whole(seq_len)].map(|shape| {
        let mut sequences = dataset.train(shape, 5).unwrap();
        let epoch: u64 = sequences.sequences_per_epoch().iter().sum();
        assert!((100..1000).contains(&epoch), "{epoch} sequences in an epoch");
        let mut all = take(&mut sequences, 700);
        let position = serde_json::to_string(&sequences.position()).unwrap();
        all.extend(take(&mut sequences, 300));
        // The rest, by a resumed run.
        let mut resumed = open().train(shape, 5).unwrap();
        resumed.seek(&serde_json::from_str::<Position>(&position).unwrap()).unwrap();
        assert!(take(&mut resumed, 300) == all[700..]);
        let held_out = dataset.held_out(shape, usize::MAX).unwrap();
        let EpochSize { sequences, without_targets, tokens, documents, targets, cut } = sequences.epoch_size();
        let size = format!(
            "EpochSize {{ sequences: {sequences}, without_targets: {without_targets}, tokens: {tokens}, \
             documents: Some({documents}), targets: Some({targets}), cut: {cut} }}"
        );
        digest(all.iter().chain(&held_out), &size)
    })
}

fn digests_of(name: &str, files: &Files) -> [String; 2] {
    let (bytes, pairs) = (Tokenizer::bytes(), folder_with_tokenizer());
    let weighted = |(name, weight)| DataSource { weight: Some(weight), ..files.source(name) };
    match name {
        "mixture" => {
            let names = [("folder", 2.0), ("chats.jsonl", 1.0), ("lines.jsonl", 1.5)];
            digests(files, &names.map(weighted), &bytes, 0.1, 96)
        }
        "together" => {
            let source = DataSource::new(["lines.jsonl", "array.json", "folder"].map(|name| files.path(name)));
            digests(files, &[source, files.source("chats.jsonl")], &bytes, 0.1, 128)
        }
        "cut" => {
            let source = DataSource { max_bytes: Some(14_000), ..files.source("folder") };
            digests(files, &[source], &bytes, 0.1, 32)
        }
        "large.txt" | "line.jsonl" => digests(files, &[files.source(name)], &pairs, 0.05, 512),
        _ => digests(files, &[files.source(name)], &bytes, 0.15, 32),
    }
}

#[test]
fn sequences_are_fixed() {
    let files = files();
    let names = DIGESTS.lines().map(|line| line.split(' ').next().unwrap());
    let names = names.filter(|name| cfg!(feature = "parquet") || *name != "rows.parquet");
    let found: Vec<_> = names.map(|name| format!("{name} {}", digests_of(name, &files).join(" "))).collect();
    let wrong: Vec<_> = found.iter().filter(|line| !DIGESTS.lines().any(|expected| expected == **line)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Kinds of data with their digests, wrapped and whole.
const DIGESTS: &str = "\
folder 152c5eb04a48161a7d3c992c83fb455a 284dc9485acd73b1dd81a1ecb8f143b5
cut 71d8bd474957de1578075074f01275a0 8b5eca35c908949b043636373dd9b9e1
large.txt b499dd5ebd18b039bb6d7cfdbd3978f7 426433abf4140824d23bae7460b97795
line.jsonl 88e17f2e2177a2b2e929afa9b66f30a5 1dcc4c88e36db384287fed785b8ce70a
lines.jsonl 8b40a20f9a1ffef8f09ecac524877280 30e8a08fbdf0c417973fb3ecc0750c6f
array.json 134fe353f563677d4283e17ee4f7e000 1bac900c47441199aaa489ee1e91aa53
rows.parquet 6b3378d0c122dd6a1cc9ede60a2ba7c4 7dea9fcd07484aaa84e6ee212a3b55ff
chats.jsonl cb723360bfc728609c6f6777d6f78820 ff7e3ea93b2906ffeaa633be01d3efd5
mixture 7cafd6102db32cbb88bd849ac5a19bcb 4a028af340bfd977d9ff6424825b8b03
together af3c41ac42d8def32579c26278099998 2eec67d45ec7af7e34c93e13316b4e7d";
