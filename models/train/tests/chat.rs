//! Chat templates against `transformers`, whose ids `chat_vectors.py` has written down, and what is wrong with their files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use train::{ChatError, ChatTemplate, Message, Tokenizer, TokenizerError};

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

/// What `chat_vectors.py` has made.
struct Vectors {
    /// The special tokens, variables, tools and conversations.
    given: Value,
    rows: Vec<Value>,
}

impl Vectors {
    fn read() -> Self {
        let text = fs::read_to_string(vectors().join("chat.jsonl")).unwrap();
        let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let given = rows.remove(0);
        Self { given, rows }
    }

    /// The tokenizer of the vectors with more special tokens.
    fn tokenizer(&self) -> Tokenizer {
        let text = fs::read_to_string(vectors().join("tokenizer.json")).unwrap();
        let mut file: Value = serde_json::from_str(&text).unwrap();
        let added = file["added_tokens"].as_array_mut().unwrap();
        let (mut token, mut id) = (added[0].clone(), added.last().unwrap()["id"].as_u64().unwrap());
        for special in self.given["special"].as_array().unwrap() {
            id += 1;
            (token["content"], token["id"]) = (special.clone(), id.into());
            added.push(token.clone());
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, file.to_string()).unwrap();
        Tokenizer::from_file(path).unwrap()
    }

    fn template(&self, source: &str, row: &Value) -> ChatTemplate {
        let tokens = self.given["tokens"].as_object().unwrap();
        let tokens = tokens.iter().map(|(name, token)| (name, token.as_str().unwrap()));
        let mut template = ChatTemplate::new(source, tokens).unwrap();
        for (name, value) in self.given["variables"].as_object().unwrap() {
            template = template.with(name, value.clone());
        }
        if row["tools"] == true { template.with("tools", self.given["tools"].clone()) } else { template }
    }

    fn messages(&self, row: &Value) -> Vec<Message> {
        let index = row["conversation"].as_u64().unwrap() as usize;
        serde_json::from_value(self.given["conversations"][index].clone()).unwrap()
    }
}

fn source(row: &Value) -> String {
    let name = row["template"].as_str().unwrap();
    fs::read_to_string(vectors().join("chat").join(format!("{name}.jinja"))).unwrap()
}

fn ids(row: &Value, key: &str) -> Vec<u32> {
    serde_json::from_value(row[key].clone()).unwrap()
}

fn mask(row: &Value) -> Vec<bool> {
    let mut mask = vec![false; ids(row, "ids").len()];
    for run in row["assistant"].as_array().unwrap() {
        let [start, len] = [0, 1].map(|i| run[i].as_u64().unwrap() as usize);
        mask[start..start + len].fill(true);
    }
    mask
}

/// What the assistant says, runs of it apart, for a reader of a failed test.
fn said(tokenizer: &Tokenizer, ids: &[u32], mask: &[bool]) -> Vec<String> {
    let pieces = ids.iter().zip(mask).collect::<Vec<_>>();
    let runs = pieces.chunk_by(|a, b| a.1 == b.1).filter(|run| *run[0].1);
    runs.map(|run| tokenizer.decode(&run.iter().map(|(id, _)| **id).collect::<Vec<_>>()).unwrap()).collect()
}

#[test]
fn templates_give_the_ids_of_transformers() {
    let vectors = Vectors::read();
    let tokenizer = vectors.tokenizer();
    let mut wrong = vec![];
    for row in &vectors.rows {
        let (template, messages) = (vectors.template(&source(row), row), vectors.messages(row));
        let at = format!("{} {} {}", row["template"], row["conversation"], row["tools"]);
        let text = template.render(&messages, false);
        if let Some(error) = row["error"].as_str() {
            let same = match (error.strip_prefix("TemplateError: "), &text) {
                (Some(refusal), Err(ChatError::Refused(message))) => message == refusal,
                (None, Err(ChatError::Render { .. })) => true,
                _ => false,
            };
            if !same {
                wrong.push(format!("{at}: {error} but {text:?}"));
            }
            continue;
        }
        let expected = ids(row, "ids");
        let expected_text = tokenizer.decode(&expected).unwrap();
        match text {
            Ok(text) if text == expected_text => {}
            text => {
                wrong.push(format!("{at}: text\n {expected_text:?}\n {text:?}"));
                continue;
            }
        }
        let prompt = template.prompt(&tokenizer, &messages).unwrap();
        let same = row["same"].as_u64().unwrap() as usize;
        if prompt != [&expected[..same], &ids(row, "then")].concat() {
            wrong.push(format!("{at}: prompt"));
        }
        match template.encode(&tokenizer, &messages) {
            Ok(conversation) => {
                if conversation.ids != expected {
                    wrong.push(format!("{at}: ids"));
                }
                if conversation.is_assistant != mask(row) {
                    wrong.push(format!(
                        "{at}: mask {:?} {:?}",
                        said(&tokenizer, &expected, &mask(row)),
                        said(&tokenizer, &expected, &conversation.is_assistant)
                    ));
                }
            }
            Err(ChatError::NoAssistant) if !mask(row).contains(&true) => {}
            Err(error) => wrong.push(format!("{at}: {error}")),
        }
        // Untagged
        if row["template"] == "values" {
            continue;
        }
        let untagged = source(row).replace("endgeneration", "endif").replace("generation %}", "if true %}");
        let template = vectors.template(&untagged, row);
        match template.encode(&tokenizer, &messages) {
            Ok(conversation) => {
                if conversation.ids != expected {
                    wrong.push(format!("{at}: untagged ids"));
                }
                if conversation.is_assistant != mask(row) {
                    wrong.push(format!(
                        "{at}: untagged mask {:?} {:?}",
                        said(&tokenizer, &expected, &mask(row)),
                        said(&tokenizer, &expected, &conversation.is_assistant)
                    ));
                }
            }
            Err(ChatError::NoAssistant) if !mask(row).contains(&true) => {}
            Err(error) => wrong.push(format!("{at}: untagged {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}\n{} wrong", wrong.join("\n"), wrong.len());
}
