//! Compares chat templates with `transformers`, whose ids `chat_vectors.py` recorded, and checks
//! errors in their files.

#[path = "harness/table.rs"]
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use table::table;
use trainer::{ChatTemplate, Message, SpecialTokens, Tokenizer};

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
}

/// Vectors made by `chat_vectors.py`.
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

    /// The vectors' tokenizer with more special tokens.
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

/// Runs of the assistant's text.
fn said(tokenizer: &Tokenizer, ids: &[u32], mask: &[bool]) -> Vec<String> {
    let pieces = ids.iter().zip(mask).collect::<Vec<_>>();
    let runs = pieces.chunk_by(|a, b| a.1 == b.1).filter(|run| *run[0].1);
    runs.map(|run| tokenizer.decode(&run.iter().map(|(id, _)| **id).collect::<Vec<_>>()).unwrap()).collect()
}

/// Runs of the assistant's text in a conversation.
fn spoken(template: &ChatTemplate, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<String>, String> {
    let encoded = template.encode(tokenizer, messages).map_err(|error| error.to_string())?;
    Ok(said(tokenizer, &encoded.ids, &encoded.is_assistant))
}

fn talk(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(role, content)| Message::new(*role, *content)).collect()
}

fn plain(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, [("eos_token", "<|end_of_text|>")]).unwrap()
}

const QUESTIONS: [(&str, &str); 4] = [("user", "q"), ("assistant", "1"), ("user", "r"), ("assistant", "2")];
/// Template without tags.
const SIMPLE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/// Checks the mask, for templates with tags and without.
fn has_the_mask(template: &ChatTemplate, tokenizer: &Tokenizer, messages: &[Message], row: &Value, at: &str) {
    let (ids, expected) = (ids(row, "ids"), mask(row));
    match template.encode(tokenizer, messages) {
        Ok(conversation) => {
            assert_eq!(conversation.ids, ids, "{at}");
            let [said, should] = [&conversation.is_assistant, &expected].map(|mask| said(tokenizer, &ids, mask));
            assert_eq!((said, conversation.is_assistant), (should, expected), "{at}");
        }
        Err(error) => {
            let is_silent = error.to_string().contains("nothing that the assistant says");
            assert!(is_silent && !expected.contains(&true), "{at}: {error}");
        }
    }
}

#[test]
fn templates_give_the_ids_of_transformers() {
    let vectors = Vectors::read();
    let tokenizer = vectors.tokenizer();
    assert!(vectors.rows.len() >= 200);
    for row in &vectors.rows {
        let source = source(row);
        let (template, messages) = (vectors.template(&source, row), vectors.messages(row));
        let at = format!("{} {} {}", row["template"], row["conversation"], row["tools"]);
        let text = template.render(&messages, false);
        if let Some(error) = row["error"].as_str() {
            let text = text.unwrap_err().to_string();
            match error.strip_prefix("TemplateError: ") {
                Some(refusal) => assert_eq!(text, format!("the chat template refuses the conversation: {refusal}")),
                None => assert!(text.starts_with("line "), "{at}: {error}, but {text}"),
            }
            continue;
        }
        let expected = ids(row, "ids");
        assert_eq!(text.unwrap(), tokenizer.decode(&expected).unwrap(), "{at}");
        let same = row["same"].as_u64().unwrap() as usize;
        let prompt = [&expected[..same], &ids(row, "then")].concat();
        assert_eq!(template.prompt(&tokenizer, &messages).unwrap(), prompt, "{at}");
        has_the_mask(&template, &tokenizer, &messages, row, &at);
        // This template has no generation prompt to speak of.
        if row["template"] != "values" {
            let untagged = source.replace("endgeneration", "endif").replace("generation %}", "if true %}");
            assert_ne!(untagged, source);
            has_the_mask(&vectors.template(&untagged, row), &tokenizer, &messages, row, &at);
        }
    }
}

#[test]
fn white_space_and_characters_of_several_tokens_are_the_assistants() {
    let text = fs::read_to_string(vectors().join("tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    // As in Llama 3, token offsets exclude white space.
    file["post_processor"] =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let folder = folder(&[("tokenizer.json", &file.to_string())]);
    let trimmed = Tokenizer::from_folder(folder.path()).unwrap();
    for content in ["\n\n  a \n\n", " 漢", "   ", "👩‍👩‍👧‍👦"] {
        let messages = talk(&[("user", "q"), ("assistant", content), ("user", " 漢"), ("assistant", content)]);
        for tokenizer in [&trimmed, &Tokenizer::bytes()] {
            // A token may begin before the assistant's text.
            for said in spoken(&plain(SIMPLE), tokenizer, &messages).unwrap() {
                assert!(said.ends_with(&format!("{content};")) && said.len() <= content.len() + 2, "{said:?}");
            }
        }
    }
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
    folder
}

#[test]
fn a_checkpoint_has_its_template_in_one_of_three_files() {
    let open = |files: &[(&str, &str)]| ChatTemplate::from_folder(folder(files).path());
    let hi = talk(&[("user", "hi")]);
    let text = |files: &[(&str, &str)]| open(files).unwrap().map(|template| template.render(&hi, false).unwrap());
    let jinja = ("chat_template.jinja", "jinja {{ bos_token }}{{ eos_token }}{{ pad_token is defined }}");
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null, "chat_template": "config {{ bos_token }}"}"#;
    let config = ("tokenizer_config.json", config);
    let json = ("chat_template.json", r#"{"chat_template": "json {{ messages[-1].content }}"}"#);
    assert_eq!(text(&[jinja, config, json]).unwrap(), "jinja <s></s>False");
    assert_eq!(text(&[config, json]).unwrap(), "config <s>");
    assert_eq!(text(&[json]).unwrap(), "json hi");
    assert_eq!(text(&[("tokenizer_config.json", r#"{"chat_template": null}"#)]), None);
    assert_eq!(text(&[]), None);
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]}"#;
    assert_eq!(text(&[("tokenizer_config.json", list)]).unwrap(), "b");

    let no_default = "chat_template is neither a text nor a list of names and templates with one named \"default\"";
    for (name, text, expected) in [
        ("tokenizer_config.json", r#"{"chat_template": 1}"#, no_default),
        ("tokenizer_config.json", r#"{"chat_template": []}"#, no_default),
        ("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": "a"}]}"#, no_default),
        ("chat_template.json", "{", "chat_template.json is not valid"),
        (
            "tokenizer_config.json",
            r#"{"chat_template": "a", "eos_token": 2}"#,
            "eos_token = 2 is not a token of this tokenizer",
        ),
    ] {
        let error = open(&[(name, text)]).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{text}: {error}");
    }
    let error = ChatTemplate::from_file("nowhere/chat_template.jinja").unwrap_err().to_string();
    assert_eq!(error, "cannot read nowhere/chat_template.jinja");
}

#[test]
fn what_is_wrong_with_a_template_or_a_conversation_is_an_error() {
    let error = ChatTemplate::new("a\n{% if %}", [("", ""); 0]).unwrap_err().to_string();
    assert!(error.starts_with("line 2 of the chat template: "), "{error}");
    assert!(ChatTemplate::new("{% generation %}", [("", ""); 0]).is_err());
    let error = plain("a").with_kwargs(json!({"messages": []}).as_object().unwrap()).unwrap_err().to_string();
    assert_eq!(error, "`messages` in `chat_template_kwargs` is not for others to set: remove it");
    for (source, messages, expected) in table::<(String, usize, String)>("refusals/templates") {
        let template = ChatTemplate::new(&source, [("", ""); 0]).map_err(|error| error.to_string());
        let talk = talk(&QUESTIONS[..messages]);
        let error = template.and_then(|template| spoken(&template, &Tokenizer::bytes(), &talk)).unwrap_err();
        assert!(error.contains(&expected), "{source}: {error}");
    }
}

#[test]
fn a_message_keeps_what_it_does_not_know() {
    let text = r#"{"role":"tool","content":null,"name":"z","a":{"y":1,"b":[]}}"#;
    let message: Message = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&message).unwrap(), text);
    let template = ChatTemplate::new("{{ messages | tojson }}{{ x }}", [("", ""); 0]).unwrap();
    let text = template.with("x", 7).render(&[message], false).unwrap();
    assert_eq!(text, r#"[{"role": "tool", "name": "z", "a": {"y": 1, "b": []}}]7"#);
    assert_eq!((template.source(), template.variables().len()), ("{{ messages | tojson }}{{ x }}", 0));
}

/// Text that only ends a conversation belongs to the last turn, if nothing else ends that turn. As in
/// GLM, a turn continues until the next role speaks. One template cannot render the empty list of
/// messages; one continues a turn after a tool without a generation prompt.
#[test]
fn a_turn_has_its_end_and_not_its_header() {
    let tokenizer = Vectors::read().tokenizer();
    for (source, turns, expected) in table::<(String, Vec<(String, String)>, Vec<String>)>("vectors/turns") {
        let turns: Vec<_> = turns.iter().map(|(role, content)| Message::new(role, content)).collect();
        let by_header = source.contains("<|start_header_id|>");
        for tokenizer in [&tokenizer, &Tokenizer::bytes()].into_iter().take(if by_header { 1 } else { 2 }) {
            assert_eq!(spoken(&plain(&source), tokenizer, &turns).unwrap(), expected, "{source}");
        }
    }
}

#[test]
fn the_token_at_which_turns_end() {
    let tokenizer = Vectors::read().tokenizer();
    let end = |turn: &str| {
        let source = format!(
            "{{% for m in messages %}}{{{{ m.role }}}}:{turn}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
        );
        let end = plain(&source).turn_end(&tokenizer);
        end.map(|id| tokenizer.decode(&[id]).unwrap())
    };
    assert_eq!(end("{{ m.content }}<|eot_id|>\n").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("{% generation %}{{ m.content }}<|eot_id|>\n{% endgeneration %}").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("<|eot_id|>{{ m.content }}\n"), None, "a token before the content ends nothing");
    assert_eq!(end("{{ raise_exception('no') }}"), None);
    // As in GLM, the next role's.
    let end = plain("{% for m in messages %}{{ '<|eot_id|>' if m.role == 'user' else '' }}{{ m.content }}{% endfor %}")
        .turn_end(&tokenizer);
    assert_eq!(end, tokenizer.encode("<|eot_id|>", SpecialTokens::InText).unwrap().first().copied());
}

/// The prompt begins a thought that the history lacks. A turn may begin with the letters of its
/// mark.
#[test]
fn a_header_is_no_target() {
    let opened = |header: &str, content: &str| {
        format!(
            "{{% for m in messages %}}{{% if m.role == 'user' %}}<|start_header_id|>user\n{{{{ m.content }}}}<|eot_id|>\n\
             {{% else %}}{header}{{{{ {content} }}}}<|eot_id|>\n{{% endif %}}{{% endfor %}}\
             {{% if add_generation_prompt %}}{header}<think>\n{{% endif %}}"
        )
    };
    let tokenizer = Vectors::read().tokenizer();
    let messages = talk(&[("user", "q"), ("assistant", "yes"), ("user", "r"), ("assistant", "<think>hm</think><thin")]);
    for header in ["<|start_header_id|>assistant\n", "<|start_header_id|>assistant: ", "ASSISTANT: "] {
        // A space before it may be in the same token.
        let said = spoken(&plain(&opened(header, "m.content")), &tokenizer, &messages).unwrap();
        let said: Vec<_> = said.iter().map(|said| said.trim_start()).collect();
        assert_eq!(said, ["yes<|eot_id|>", "<think>hm</think><thin<|eot_id|>"], "{header}");
    }
    // A template that drops the thought does not show where the content begins.
    let template = opened("<|start_header_id|>assistant\n", "m.content.split('</think>')[-1]");
    let said = spoken(&plain(&template), &tokenizer, &messages).unwrap();
    assert_eq!(said, ["yes<|eot_id|>", "<thin<|eot_id|>"]);
}

#[test]
fn messages_that_are_not_learned_are_no_targets() {
    let all = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}";
    let answers =
        all.replace("{% gen", "{% if m.role == 'assistant' %}{% gen").replace("{% endfor", "{% endif %}{% endfor");
    let learned = |source: &str, key: &str, values: Value| {
        let mut messages = talk(&QUESTIONS);
        messages[1].rest.insert(key.into(), values[0].clone());
        messages[3].rest.insert(key.into(), values[1].clone());
        spoken(&plain(source), &Tokenizer::bytes(), &messages).map(|said| said.concat())
    };
    for (key, values, expected) in [
        ("weight", json!([0, 1]), Ok("2;")),
        ("weight", json!([1.0, 0.0]), Ok("1;")),
        ("train", json!([false, null]), Ok("2;")),
        ("trainable", json!([true, false]), Ok("1;")),
        ("loss", json!([false, false]), Ok("")),
        ("weight", json!([0.5, 0]), Err("`weight` of message 1 is 0.5, expected 0 or 1")),
        ("train", json!(["no", null]), Err("`train` of message 1 is \"no\", expected true or false")),
    ] {
        let expected = expected.map(String::from).map_err(String::from);
        assert_eq!(learned(SIMPLE, key, values.clone()), expected);
        assert_eq!(learned(&answers, key, values), expected);
    }
    // Tags around the user's text too.
    assert!(learned(all, "weight", json!([0, 1])).unwrap_err().contains("which part of the text is message 1:"));
}

/// Templates may be untrusted. Without limits, `refusals/templates` would take unbounded time,
/// memory or stack.
#[test]
fn templates_have_limits() {
    let render = |source: &str| {
        ChatTemplate::new(source, [("", ""); 0]).and_then(|template| template.render(&talk(&[("user", "hi")]), false))
    };
    let chain = format!("{{{{ 1{} }}}}", "~1".repeat(120_000));
    for (source, expected) in [
        (" ".repeat(300_000), "it has 300000 bytes, more than 262144"),
        (chain, "compiling it takes more than 3 seconds"),
    ] {
        let error = render(&source).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Templates within the limits render correctly.
    let nested = format!("{}ns.a{}", "[".repeat(40), "]".repeat(40));
    let nested = format!(
        "{{% set ns=namespace(a=1) %}}{{% for i in range(5000) %}}{{% set ns.a = {nested} %}}{{% endfor %}}{{{{ (ns.a ~ '')|length }}}}"
    );
    for (source, expected) in [vec![(nested, "400001".to_string())], table("vectors/templates")].concat() {
        assert_eq!(render(&source).unwrap(), expected, "{source}");
    }
}
