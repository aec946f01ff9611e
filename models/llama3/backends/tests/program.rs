//! The program `llama3`, as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn llama3(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_llama3")).args(arguments).output().unwrap()
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../train/tests/vectors")
}

/// A file with this text, and its path.
fn file(text: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines.jsonl");
    std::fs::write(&path, text).unwrap();
    (folder, path.display().to_string())
}

fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    str::from_utf8(&output.stderr).unwrap()
}

#[test]
fn text_to_ids_and_back() {
    let tokenizer = vectors().join("tokenizer.json").display().to_string();
    let (_folder, lines) = file("\"<|eot_id|>\"\n\n\"né\\u0000 \\ud83d\\udc69\"\r\n\"\"");
    let special = llama3(&["tokenize", "--tokenizer", &tokenizer, "--special", &lines]);
    assert!(stdout(&special).starts_with("[4]\n["), "{}", stdout(&special));
    let text = llama3(&["tokenize", "--tokenizer", &tokenizer, &lines]);
    assert_ne!(stdout(&text), stdout(&special));
    assert_eq!(stdout(&text).lines().count(), 3);
    for ids in [special, text] {
        let (_folder, ids) = file(stdout(&ids));
        let back = llama3(&["tokenize", "--tokenizer", &tokenizer, "--decode", &ids]);
        assert_eq!(stdout(&back), "\"<|eot_id|>\"\n\"né\\u0000 👩\"\n\"\"\n");
    }
    let (_folder, lines) = file("\"né\"");
    assert_eq!(stdout(&llama3(&["tokenize", "--tokenizer", "bytes", &lines])), "[110,195,169]\n");
}

#[test]
fn what_cannot_be_tokenized_is_named() {
    let tokenize = |arguments: &[&str]| {
        let output = llama3(&[&["tokenize", "--tokenizer"], arguments].concat());
        stderr(&output).to_string()
    };
    let (folder, lines) = file("\"a\"\n{\"text\": 1}\n");
    assert!(tokenize(&["bytes", &lines]).contains("lines.jsonl:2: expected a JSON string"));
    let (_other, ids) = file("[97]\n[97, 300]\n");
    assert!(tokenize(&["bytes", "--decode", &ids]).contains("lines.jsonl:2: 300 is no token"));
    let folder = folder.path().display().to_string();
    assert!(tokenize(&[&folder, &lines]).contains("has neither tokenizer.json nor tokenizer.model"));
    assert!(tokenize(&["bytes", &format!("{folder}/none")]).contains("cannot read"));
    assert!(tokenize(&["bytes", "--special", "--decode", &ids]).contains("cannot be used with"));
    // Half of a surrogate pair is no text.
    let (_half, lines) = file("\"\\ud83d\"");
    assert!(tokenize(&["bytes", &lines]).contains("lines.jsonl:1: expected a JSON string"));
}

#[test]
fn train_takes_what_the_example_takes() {
    let data = file(&"fn main() { println!(\"one, two, three\"); }\n".repeat(400));
    let run = |tokenizer: &str| {
        let model =
            ["vocab_size=1008", "num_layers=1", "hidden_size=32", "num_heads=2", "num_kv_heads=1", "head_dim=16"];
        let model = model.map(|setting| format!("model.{setting}"));
        let other = [tokenizer, "training.seq_len=16", "data.held_out_fraction=0.3"].map(String::from);
        let settings = [&model[..], &other[..]].concat();
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let arguments = ["train", "--device", "cpu", "--steps", "2", "--data", &data.1];
        let output = llama3(&arguments.into_iter().chain(settings).collect::<Vec<_>>());
        stdout(&output).to_string()
    };
    let tokenizer = format!("data.tokenizer={}", vectors().display());
    for (tokenizer, line) in [("data.tokenizer=bytes", "bytes, 257"), (&*tokenizer, "tokenizer.json, 1001")] {
        let log = run(tokenizer);
        assert!(log.contains(&format!("tokenizer: {line} tokens\n")), "{log}");
        assert!(log.contains("step:  2") && log.contains("held-out loss") && log.contains("sample:"), "{log}");
    }
}

#[test]
fn a_configuration_is_printed_and_nothing_trained() {
    let printed = llama3(&["train", "--recipe", "rowwise", "--data", "nowhere", "--print-config"]);
    let text = stdout(&printed);
    assert!(text.contains("recipe = \"rowwise\"") && text.contains("paths = [\"nowhere\"]"), "{text}");
    assert!(text.contains("decay_ratio = 0.2"), "defaults too: {text}");
}
