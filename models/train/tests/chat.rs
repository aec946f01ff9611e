//! Compares chat templates with `transformers`, whose ids `chat_vectors.py` recorded, and checks
//! errors in their files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use train::{ChatError, ChatTemplate, Conversation, Message, SpecialTokens, Tokenizer};

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

/// Runs of the assistant's text, for messages of failed tests.
fn said(tokenizer: &Tokenizer, ids: &[u32], mask: &[bool]) -> Vec<String> {
    let pieces = ids.iter().zip(mask).collect::<Vec<_>>();
    let runs = pieces.chunk_by(|a, b| a.1 == b.1).filter(|run| *run[0].1);
    runs.map(|run| tokenizer.decode(&run.iter().map(|(id, _)| **id).collect::<Vec<_>>()).unwrap()).collect()
}

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
            assert!(matches!(error, ChatError::NoAssistant { .. }) && !expected.contains(&true), "{at}: {error}");
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
            match (error.strip_prefix("TemplateError: "), text) {
                (Some(refusal), Err(ChatError::Refused(message))) => assert_eq!(message, refusal, "{at}"),
                (None, Err(ChatError::Render { .. })) => {}
                (_, text) => panic!("{at}: {error}, but {text:?}"),
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
    let source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::new(source, NO_TOKENS).unwrap();
    for content in ["\n\n  a \n\n", " 漢", "   ", "👩‍👩‍👧‍👦"] {
        let messages = [("user", "q"), ("assistant", content), ("user", " 漢"), ("assistant", content)];
        let messages = messages.map(|(role, content)| Message::new(role, content));
        for tokenizer in [&trimmed, &Tokenizer::bytes()] {
            let Conversation { ids, is_assistant, .. } = template.encode(tokenizer, &messages).unwrap();
            // A token may begin before the assistant's text.
            for said in said(tokenizer, &ids, &is_assistant) {
                assert!(said.ends_with(&format!("{content};")) && said.len() <= content.len() + 2, "{said:?}");
            }
        }
    }
}

const NO_TOKENS: [(&str, &str); 0] = [];

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
    folder
}

#[test]
fn a_checkpoint_has_its_template_in_one_of_three_files() {
    let source = |files: &[(&str, &str)]| {
        let template = ChatTemplate::from_folder(folder(files).path()).unwrap();
        template.map(|template| template.render(&[Message::new("user", "hi")], false).unwrap())
    };
    let jinja = ("chat_template.jinja", "jinja {{ bos_token }}{{ eos_token }}{{ pad_token is defined }}");
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null, "chat_template": "config {{ bos_token }}"}"#;
    let config = ("tokenizer_config.json", config);
    let json = ("chat_template.json", r#"{"chat_template": "json {{ messages[-1].content }}"}"#);
    assert_eq!(source(&[jinja, config, json]).unwrap(), "jinja <s></s>False");
    assert_eq!(source(&[config, json]).unwrap(), "config <s>");
    assert_eq!(source(&[json]).unwrap(), "json hi");
    assert_eq!(source(&[("tokenizer_config.json", r#"{"chat_template": null}"#)]), None);
    assert_eq!(source(&[]), None);
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]}"#;
    assert_eq!(source(&[("tokenizer_config.json", list)]).unwrap(), "b");

    let error = |name, text| ChatTemplate::from_folder(folder(&[(name, text)]).path()).unwrap_err();
    for text in [
        r#"{"chat_template": 1}"#,
        r#"{"chat_template": []}"#,
        r#"{"chat_template": [{"name": "rag", "template": "a"}]}"#,
    ] {
        assert!(matches!(error("tokenizer_config.json", text), ChatError::NoDefault { .. }), "{text}");
    }
    let message = error("chat_template.json", "{").to_string();
    assert!(message.ends_with("chat_template.json is not valid"), "{message}");
    let message = error("tokenizer_config.json", r#"{"chat_template": "a", "eos_token": 2}"#).to_string();
    assert!(message.ends_with("eos_token = 2 is not a token of this tokenizer"), "{message}");
    let error = ChatTemplate::from_file("nowhere/chat_template.jinja").unwrap_err();
    assert!(matches!(error, ChatError::Io { .. }), "{error}");
}

#[test]
fn what_is_wrong_with_a_template_or_a_conversation_is_an_error() {
    let error = ChatTemplate::new("a\n{% if %}", NO_TOKENS).unwrap_err();
    assert!(matches!(error, ChatError::Syntax { line: 2, .. }), "{error}");
    assert!(ChatTemplate::new("{% generation %}", NO_TOKENS).is_err());

    let tokenizer = Tokenizer::bytes();
    let talk = ["user", "assistant"].map(|role| Message::new(role, "text"));
    let encode = |source: &str, messages: &[Message]| {
        ChatTemplate::new(source, NO_TOKENS).unwrap().encode(&tokenizer, messages).unwrap_err()
    };
    let plain = "{% for m in messages %}{{ m.content }}.{% endfor %}";
    assert!(matches!(encode(plain, &[]), ChatError::Empty));
    assert!(matches!(encode(plain, &talk[..1]), ChatError::NoAssistant { .. }));
    assert!(matches!(encode("{% if true %}\n{{ missing.x }}{% endif %}", &talk), ChatError::Render { line: 2, .. }));
    let error = encode("\n{{ strftime_now('%Y') }}", &talk).to_string();
    assert_eq!(error, "line 2 of the chat template: unknown function: strftime_now is unknown");
    let within = "{% macro check() %}{{ raise_exception('no ' + messages[0].role) }}{% endmacro %}{{ check() }}";
    assert_eq!(encode(within, &talk).to_string(), "the chat template refuses the conversation: no user");
    // No part of the text depends on the message.
    let error = encode("{{ messages | length }}{{ add_generation_prompt }}", &talk);
    assert!(matches!(error, ChatError::NotSeparable { index: 1 }), "{error}");
    let changed = "{% set text %}{% generation %} a {% endgeneration %}{% endset %}{{ text[:2] }}";
    assert!(matches!(encode(changed, &talk), ChatError::Tags));
    // A template with tags that renders none.
    let unused = "{% if false %}{% generation %}a{% endgeneration %}{% endif %}b";
    assert!(matches!(encode(unused, &talk), ChatError::NoAssistant { .. }));
}

#[test]
fn a_message_keeps_what_it_does_not_know() {
    let text = r#"{"role":"tool","content":null,"name":"z","a":{"y":1,"b":[]}}"#;
    let message: Message = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&message).unwrap(), text);
    let template = ChatTemplate::new("{{ messages | tojson }}{{ x }}", NO_TOKENS).unwrap();
    let text = template.with("x", 7).render(&[message], false).unwrap();
    assert_eq!(text, r#"[{"role": "tool", "name": "z", "a": {"y": 1, "b": []}}]7"#);
    assert_eq!((template.source(), template.variables().len()), ("{{ messages | tojson }}{{ x }}", 0));
}

/// Text that only ends a conversation belongs to the last turn, if nothing else ends that turn.
#[test]
fn the_end_of_the_conversation_ends_the_last_turn() {
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
                  {% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}";
    let messages = [("user", "q"), ("assistant", "1"), ("user", "r"), ("assistant", "2")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    let template = ChatTemplate::new(source, [("eos_token", "<|end_of_text|>")]).unwrap();
    for tokenizer in [Vectors::read().tokenizer(), Tokenizer::bytes()] {
        let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
        assert_eq!(said(&tokenizer, &ids, &is_assistant), ["1\n", "2\n<|end_of_text|>"]);
    }
}

/// As in GLM, a turn continues until the next role speaks.
#[test]
fn the_token_of_the_next_role_ends_a_turn() {
    let source = "{% for m in messages %}{{ '<|start_header_id|>' if m.role == 'user' else '<|end_header_id|>' }}\n{{ m.content }}{% endfor %}\
                  {% if add_generation_prompt %}<|end_header_id|>\n{% endif %}";
    let template = ChatTemplate::new(source, NO_TOKENS).unwrap();
    let messages = [("user", "q"), ("assistant", "1"), ("user", "r"), ("assistant", "2")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    let tokenizer = Vectors::read().tokenizer();
    let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
    assert_eq!(said(&tokenizer, &ids, &is_assistant), ["1<|start_header_id|>", "2"]);
    let [next] = tokenizer.encode("<|start_header_id|>", SpecialTokens::InText).unwrap()[..] else { panic!() };
    assert_eq!(template.turn_end(&tokenizer), Some(next));
}

#[test]
fn the_token_at_which_turns_end() {
    let tokenizer = Vectors::read().tokenizer();
    let end = |turn: &str| {
        let source = format!(
            "{{% for m in messages %}}{{{{ m.role }}}}:{turn}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
        );
        let end = ChatTemplate::new(&source, NO_TOKENS).unwrap().turn_end(&tokenizer);
        end.map(|id| tokenizer.decode(&[id]).unwrap())
    };
    assert_eq!(end("{{ m.content }}<|eot_id|>\n").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("{% generation %}{{ m.content }}<|eot_id|>\n{% endgeneration %}").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>").as_deref(), Some("<|eot_id|>"));
    assert_eq!(end("<|eot_id|>{{ m.content }}\n"), None, "a token before the content ends nothing");
    assert_eq!(end("{{ raise_exception('no') }}"), None);
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
    let messages = [("user", "q"), ("assistant", "yes"), ("user", "r"), ("assistant", "<think>hm</think><thin")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    for header in ["<|start_header_id|>assistant\n", "<|start_header_id|>assistant: ", "ASSISTANT: "] {
        let template = ChatTemplate::new(&opened(header, "m.content"), NO_TOKENS).unwrap();
        let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
        // A space before it may be in the same token.
        let said = said(&tokenizer, &ids, &is_assistant);
        let said: Vec<_> = said.iter().map(|said| said.trim_start()).collect();
        assert_eq!(said, ["yes<|eot_id|>", "<think>hm</think><thin<|eot_id|>"], "{header}");
    }
    // A template that drops the thought does not show where the content begins.
    let template = opened("<|start_header_id|>assistant\n", "m.content.split('</think>')[-1]");
    let template = ChatTemplate::new(&template, NO_TOKENS).unwrap();
    let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
    assert_eq!(said(&tokenizer, &ids, &is_assistant), ["yes<|eot_id|>", "<thin<|eot_id|>"]);
}

#[test]
fn messages_that_are_not_learned_are_no_targets() {
    let plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let all = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}";
    let answers =
        all.replace("{% gen", "{% if m.role == 'assistant' %}{% gen").replace("{% endfor", "{% endif %}{% endfor");
    let learned = |source: &str, key: &str, values: Value| {
        let messages = [("user", "q"), ("assistant", "1"), ("user", "r"), ("assistant", "2")];
        let mut messages = messages.map(|(role, content)| Message::new(role, content));
        messages[1].rest.insert(key.into(), values[0].clone());
        messages[3].rest.insert(key.into(), values[1].clone());
        let (template, tokenizer) = (ChatTemplate::new(source, NO_TOKENS).unwrap(), Tokenizer::bytes());
        let Conversation { ids, is_assistant, .. } =
            template.encode(&tokenizer, &messages).map_err(|e| e.to_string())?;
        Ok::<_, String>(said(&tokenizer, &ids, &is_assistant).concat())
    };
    for (key, values, expected) in [
        ("weight", json!([0, 1]), "2;"),
        ("weight", json!([1.0, 0.0]), "1;"),
        ("train", json!([false, null]), "2;"),
        ("trainable", json!([true, false]), "1;"),
        ("loss", json!([false, false]), ""),
    ] {
        assert_eq!(learned(plain, key, values.clone()).unwrap(), expected);
        assert_eq!(learned(&answers, key, values).unwrap(), expected);
    }
    for (key, value, expected) in [
        ("weight", json!(0.5), "`weight` of message 1 is 0.5, expected 0 or 1"),
        ("train", json!("no"), "`train` of message 1 is \"no\", expected true or false"),
    ] {
        assert_eq!(learned(plain, key, json!([value, null])).unwrap_err(), expected);
    }
    // Tags around the user's text too.
    assert!(learned(all, "weight", json!([0, 1])).unwrap_err().contains("which part of the text is message 1:"));
}

/// This template cannot render the empty list of messages before the first one.
#[test]
fn an_assistant_may_speak_first() {
    let source = "{{ messages[0]['role'] }}|{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = ChatTemplate::new(source, NO_TOKENS).unwrap();
    let tokenizer = Tokenizer::bytes();
    let messages =
        [("assistant", "One"), ("user", "Two"), ("assistant", "")].map(|(role, text)| Message::new(role, text));
    let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
    assert_eq!(said(&tokenizer, &ids, &is_assistant), ["One</>\n", "</>\n"]);
}

/// After a tool, this template continues the turn without a generation prompt. The previous turn's
/// prompt must not be used for it.
#[test]
fn a_turn_without_a_prompt_begins_after_the_turn_before() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }};{% elif m.role == 'tool' %}<tool>\
                  {% elif loop.previtem.role == 'tool' %}{{ m.content }};{% else %}A:{{ m.content }};{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}A:{% endif %}";
    let template = ChatTemplate::new(source, NO_TOKENS).unwrap();
    let tokenizer = Tokenizer::bytes();
    let messages = [("user", "q"), ("assistant", "x"), ("tool", "7"), ("assistant", "y")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    assert_eq!(template.render(&messages, false).unwrap(), "U:q;A:x;<tool>y;");
    let Conversation { ids, is_assistant, .. } = template.encode(&tokenizer, &messages).unwrap();
    assert_eq!(said(&tokenizer, &ids, &is_assistant), ["x;", "y;"]);
}

/// Templates may be untrusted: each of these took unbounded time, memory or stack.
#[test]
fn a_template_that_takes_too_much_is_an_error() {
    let messages = [Message::new("user", "hi")];
    let chain = format!("{{{{ 1{} }}}}", "~1".repeat(120_000));
    let render = |source: &str| ChatTemplate::new(source, [("", ""); 0])?.render(&messages, false);
    for (source, expected) in [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
            "it takes more than 10000000 steps",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(9999) %}{{ 'x' * 50000 }}{% endfor %}{% endfor %}",
            "it makes a text of more than",
        ),
        ("{{ '%99999999999d'|format(1) }}", "a format with a width"),
        ("{{ '%*d'|format(99999999999, 1) }}", "a format with a width"),
        ("{{ '{:99999999999}'.format(1) }}", "a format with a width"),
        ("{{ ('a' * 9999)|replace('', 'b' * 99999) }}", "the text after `replace` is too long"),
        ("{{ ('a' * 9999).replace('', 'b' * 99999) }}", "the text after `replace` is too long"),
        ("{{ (','*1000000).join([1]*100000)|length }}", "the text after `join` is too long"),
        ("{{ ([1]*100000)|join(','*1000000)|length }}", "the text after `join` is too long"),
        ("{{ ([1]*100000)|tojson(indent=','*1000000)|length }}", "the text of `tojson` is too long"),
        ("{{ [1]|batch(999999999999) }}", "a batch of 999999999999 is too large"),
        ("{{ [1]|slice(999999999999) }}", "a slice of 999999999999 is too large"),
        ("{{ 'a\nb'|indent(999999999999) }}", "an indent of"),
        ("{% set ns=namespace() %}{% set ns.a = ns %}{{ ns }}", "a namespace in a variable of another"),
        (
            "{% set ns=namespace() %}{% set b = ns %}{%- set ns.a = '%}' ~ 1, [{'c': b}] -%}{{ ns ~ '' }}",
            "a namespace in a variable of another",
        ),
        ("{% set ns=namespace(a=1) %}{% for i in range(99999) %}{% set ns.a = [ns.a] %}{% endfor %}", "lists in lists"),
        (
            "{% set ns=namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
            "a variable is too long",
        ),
        (
            "{% set ns=namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
            "a variable of more than 1000000 values",
        ),
        ("{{ (['x'*100000]*100000)|join|length }}", "a filter of more than 134217728 bytes"),
        ("{% set a=['x'*1000000]*100000 %}{{ a|tojson|length }}", "a filter of more than 134217728 bytes"),
        ("{{ (['x'*1000000]*100000)|string|length }}", "a filter of more than 134217728 bytes"),
        (
            "{% set a='x'*1000000 %}{% for i in range(99999) %}{% set b = a|lower %}{% endfor %}",
            "its filters and methods read more than 1073741824 bytes",
        ),
        (
            "{% set a='x'*1000000 %}{% for i in range(99999) %}{% set b = a.find('y') %}{% endfor %}",
            "its filters and methods read more than 1073741824 bytes",
        ),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion limit exceeded"),
        (&" ".repeat(300_000), "it has 300000 bytes, more than 262144"),
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains(expected), "{}: {error}", &source[..source.len().min(80)]);
    }
    // Templates within the limits render correctly.
    assert_eq!(render(&chain).unwrap(), "1".repeat(120_001));
    for (source, expected) in [
        ("{{ 'abc'.count('') }} {{ 'abab'.count('ab') }}", "4 2"),
        ("{{ 'abab'.replace('b', 'c', 1) }} {{ 'ab'.replace('', '-') }}", "acab -a-b-"),
        ("{{ '%03d %s'|format(7, 'x') }} {{ '{:>4}'.format('x') }}", "007 x    x"),
        (
            "{{ 'a\nb\n\nc'|indent(2) }}|{{ 'a\n\nb'|indent(width=1, first=true, blank=true) }}",
            "a\n  b\n\n  c| a\n \n b",
        ),
        ("{# {% set a = 1 %} #}{% raw %}{% set b = 2 %}{% endraw %}", "{% set b = 2 %}"),
        ("{% set a, b = 1, 'x' if 1 == 1 else 'y' %}{%- set c -%}d{% endset %}{{ a }}{{ b }}{{ c }}", "1xd"),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l }}",
            "[0, 1, 2]",
        ),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}
