//! What the documentation says: its commands run, and its list of keys is the program's.

use std::fs;
use std::path::{Path, PathBuf};

use llama3::RunConfig;
use train::checkpoint::MAY_CHANGE;

use crate::support::{command, small, stdout, train, vectors};

const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}\
                             {% if add_generation_prompt %}assistant: {% endif %}";

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs")
}

/// Lines of `sh` blocks that call the program, split as a shell does; quoted arguments have no quotes within.
fn commands(text: &str) -> Vec<Vec<String>> {
    let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let calls = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("llama3 "));
    let words = |line: &str| {
        let mut words = vec![];
        for (i, part) in line.split('"').enumerate() {
            match i % 2 {
                0 => words.extend(part.split_whitespace().map(String::from)),
                _ => words.push(part.to_string()),
            }
        }
        words
    };
    calls.map(words).collect()
}

/// The files that the commands name: a small model in place of the large one.
fn prepare(folder: &Path) {
    fs::create_dir(folder.join("text")).unwrap();
    fs::write(folder.join("text/a.txt"), "One line after another, and then one more.\n".repeat(2000)).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "What is FP8?"}, {"role": "assistant", "content": "Eight bits."}]}"#;
    fs::write(folder.join("chats.jsonl"), format!("{chat}\n").repeat(2000)).unwrap();
    fs::write(folder.join("strings.jsonl"), "\"some text\"\n").unwrap();
    fs::write(folder.join("ids.jsonl"), "[72, 105]\n").unwrap();
    let tokenizer = folder.join("tokenizer");
    fs::create_dir(&tokenizer).unwrap();
    fs::copy(vectors().join("tokenizer.json"), tokenizer.join("tokenizer.json")).unwrap();
    fs::write(tokenizer.join("chat_template.jinja"), CHAT_TEMPLATE).unwrap();
    fs::write(tokenizer.join("tokenizer_config.json"), r#"{"bos_token": "<|begin_of_text|>"}"#).unwrap();
    let settings = [&*format!("data.tokenizer={}", tokenizer.display()), "training.steps=1"];
    let run = folder.join("run");
    let mut made = train(&small(folder.join("text").to_str().unwrap(), &settings));
    stdout(&made.args(["--checkpoints", run.to_str().unwrap()]).output().unwrap());
    let exported = folder.join("Llama-3.2-1B");
    stdout(&command(&["export", run.to_str().unwrap(), exported.to_str().unwrap()]).output().unwrap());
    assert!(exported.join("chat_template.jinja").exists());
}

#[test]
fn the_commands_of_the_documentation_run() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let mut ran = 0;
    for entry in fs::read_dir(docs()).unwrap() {
        for words in commands(&fs::read_to_string(entry.unwrap().path()).unwrap()) {
            let output = command(&[]).args(&words).current_dir(folder.path()).output().unwrap();
            assert!(output.status.success(), "{words:?}\n{}", String::from_utf8_lossy(&output.stderr));
            ran += 1;
        }
    }
    assert!(ran >= 10, "{ran} commands");
    assert!(folder.path().join("Llama-mine/model.safetensors").exists());
}

#[test]
fn its_configurations_are_read() {
    for entry in fs::read_dir(docs()).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        for block in text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            RunConfig::from_toml(Path::new("docs"), block).unwrap().validate().unwrap();
        }
    }
}

#[test]
fn keys_that_may_change_are_listed() {
    let text = fs::read_to_string(docs().join("runs.md")).unwrap();
    for key in MAY_CHANGE {
        let key = if key.ends_with('.') { format!("{key}*") } else { key.to_string() };
        assert!(text.contains(&format!("`{key}`")), "{key}");
    }
}
