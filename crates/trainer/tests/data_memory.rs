//! Memory of a process that reads large files. This binary has no other test.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{BufWriter, Write};

use trainer::{DataSource, Dataset, Packing, SequenceShape, Tokenizer, Validation};

/// Peak resident memory of this process in bytes.
fn peak_resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

const LIMIT: u64 = 300 << 20;

/// One test, since a process has one peak.
#[test]
fn memory_is_bounded() {
    let dir = tempfile::TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    let open = |source: DataSource, fraction| {
        Dataset::open(&[source], Validation::Fraction(fraction), &Tokenizer::bytes(), None, &cache, &mut |_| {})
            .unwrap()
    };
    let shape = SequenceShape { batch_size: 8, seq_len: 1024, packing: Some(Packing::Wrapped) };

    // 10 GB without a byte on disk: a sparse file of tokens 0 after the header.
    let path = dir.path().join("tokens.bin");
    let tokens = (10_000_000_000 - 1024 - 8) / 2;
    let tokenizer = Tokenizer::bytes().fingerprint();
    let header = format!(
        r#"{{"format": 1, "dtype": "uint16", "tokens": {tokens}, "has_mask": false, "documents": 1, "tokenizer": "{tokenizer}"}}"#
    );
    let mut file = File::create(&path).unwrap();
    write!(file, "{header:1024}").unwrap();
    file.set_len(10_000_000_000).unwrap();
    drop(file);
    let dataset = open(DataSource::new([&path]), 0.001);
    assert_eq!(dataset.size().train_tokens + dataset.size().held_out_tokens, tokens);
    let mut sequences = dataset.train(shape, 1).unwrap();
    assert_eq!(sequences.sequences_per_epoch(), [(dataset.size().train_tokens - 1).div_ceil(1024)]);
    for sequence in sequences.by_ref().take(3000) {
        assert_eq!(sequence.unwrap().tokens, [0; 1025]);
    }
    let mut resumed = dataset.train(shape, 1).unwrap();
    resumed.seek(&sequences.position()).unwrap();
    assert_eq!(resumed.taken(), 3000);
    assert_eq!(dataset.held_out(shape, 64).unwrap().len(), 64);

    // The file is compared with its earlier state by samples and modification time.
    let position = sequences.position();
    let again = File::options().append(true).open(&path).unwrap();
    again.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(100)).unwrap();
    let error = open(DataSource::new([&path]), 0.001).train(shape, 1).unwrap().seek(&position).unwrap_err();
    assert!(error.to_string().contains("tokens.bin changed since the checkpoint: its last change was at"), "{error}");
    let peak = peak_resident();
    assert!(peak < LIMIT, "{peak} bytes after 10 GB of tokens");

    // 100 MB of text in one document, also compressed.
    for (name, is_compressed) in [("large.txt", false), ("large.txt.zst", true)] {
        let path = dir.path().join(name);
        let file = BufWriter::new(File::create(&path).unwrap());
        let mut file: Box<dyn Write> =
            if is_compressed { Box::new(zstd::Encoder::new(file, 1).unwrap().auto_finish()) } else { Box::new(file) };
        let line = "one line of a large text, which has many lines like this one\n".repeat(1000);
        let mut bytes = 0;
        while bytes < 100_000_000 {
            file.write_all(line.as_bytes()).unwrap();
            bytes += line.len() as u64;
        }
        drop(file);
        let dataset = open(DataSource::new([&path]), 0.1);
        let size = dataset.size();
        assert_eq!(size.train_tokens + size.held_out_tokens, bytes + 1);
        assert_eq!(size.held_out_tokens, (bytes + 1) / 10);
        for sequence in dataset.train(shape, 1).unwrap().take(1000) {
            assert_eq!(sequence.unwrap().num_tokens, 1025);
        }
    }
    let peak = peak_resident();
    println!("{} MiB at most", peak >> 20);
    assert!(peak < LIMIT, "{peak} bytes after 200 MB of text");
}
