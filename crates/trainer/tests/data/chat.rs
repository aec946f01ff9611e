//! Compares chat templates with `transformers`, whose ids `chat_vectors.py` recorded, and checks
//! errors in their files.

use crate::*;

/// First line of the vectors made by `chat_vectors.py`.
#[derive(Deserialize)]
struct Given {
    special: Vec<String>,
    tokens: BTreeMap<String, String>,
    variables: BTreeMap<String, Value>,
    tools: Value,
    conversations: Vec<Vec<Message>>,
}

/// A template's ids for a conversation, the runs of the assistant's tokens, and a prompt: the first
/// `same` ids, `then` others.
#[derive(Deserialize)]
struct Row {
    template: String,
    conversation: usize,
    tools: bool,
    error: Option<String>,
    #[serde(default)]
    ids: Vec<u32>,
    #[serde(default)]
    assistant: Vec<[usize; 2]>,
    #[serde(default)]
    same: usize,
    #[serde(default)]
    then: Vec<u32>,
}

fn given() -> (Given, Vec<Row>) {
    let mut rows = table::<Value>("vectors/chat");
    let given = serde_json::from_value(rows.remove(0)).unwrap();
    (given, rows.into_iter().map(|row| serde_json::from_value(row).unwrap()).collect())
}

impl Given {
    /// The vectors' tokenizer with more special tokens.
    fn tokenizer(&self) -> Tokenizer {
        let mut file = tokenizer_json();
        let added = file["added_tokens"].as_array_mut().unwrap();
        let (mut token, mut id) = (added[0].clone(), added.last().unwrap()["id"].as_u64().unwrap());
        for special in &self.special {
            id += 1;
            (token["content"], token["id"]) = (special.clone().into(), id.into());
            added.push(token.clone());
        }
        Tokenizer::from_folder(folder(&json!({ "tokenizer.json": file })).path()).unwrap()
    }

    fn template(&self, source: &str, row: &Row) -> ChatTemplate {
        let mut template = ChatTemplate::new(source, self.tokens.iter().map(|(name, token)| (name, &**token))).unwrap();
        for (name, value) in &self.variables {
            template = template.with(name, value.clone());
        }
        if row.tools { template.with("tools", self.tools.clone()) } else { template }
    }
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

#[test]
fn templates_give_the_ids_of_transformers() {
    let (given, rows) = given();
    let tokenizer = given.tokenizer();
    assert!(rows.len() >= 200);
    for row in rows {
        let source = fs::read_to_string(vectors().join(format!("chat/{}.jinja", row.template))).unwrap();
        let (template, messages) = (given.template(&source, &row), &given.conversations[row.conversation]);
        let at = format!("{} {} {}", row.template, row.conversation, row.tools);
        let text = template.render(messages, false);
        if let Some(error) = &row.error {
            let text = text.unwrap_err().to_string();
            match error.strip_prefix("TemplateError: ") {
                Some(refusal) => assert_eq!(text, format!("the chat template refuses the conversation: {refusal}")),
                None => assert!(text.starts_with("line "), "{at}: {error}, but {text}"),
            }
            continue;
        }
        assert_eq!(text.unwrap(), tokenizer.decode(&row.ids).unwrap(), "{at}");
        let prompt = [&row.ids[..row.same], &row.then].concat();
        assert_eq!(template.prompt(&tokenizer, messages).unwrap(), prompt, "{at}");
        let mut expected = vec![false; row.ids.len()];
        row.assistant.iter().for_each(|[start, len]| expected[*start..start + len].fill(true));
        // With tags and without. This template has no generation prompt to speak of.
        let untagged = source.replace("endgeneration", "endif").replace("generation %}", "if true %}");
        assert_ne!(untagged, source);
        let untagged = (row.template != "values").then(|| given.template(&untagged, &row));
        for template in [template].into_iter().chain(untagged) {
            match template.encode(&tokenizer, messages) {
                Ok(found) => {
                    let [said, should] = [&found.is_assistant, &expected].map(|mask| said(&tokenizer, &row.ids, mask));
                    assert_eq!((said, found.is_assistant, &found.ids), (should, expected.clone(), &row.ids), "{at}");
                }
                Err(error) => {
                    let is_silent = error.to_string().contains("no text of the assistant");
                    assert!(is_silent && !expected.contains(&true), "{at}: {error}");
                }
            }
        }
    }
}

#[test]
fn white_space_and_characters_of_several_tokens_are_the_assistants() {
    let mut file = tokenizer_json();
    // As in Llama 3, token offsets exclude white space.
    file["post_processor"] =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let trimmed = Tokenizer::from_folder(folder(&json!({ "tokenizer.json": file })).path()).unwrap();
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

/// A row has the files, as texts or JSON, and the text of a conversation, or the end of an error.
#[test]
fn a_checkpoint_has_its_template_in_one_of_three_files() {
    for (files, rendered, error) in table::<(Value, Option<String>, String)>("vectors/template_files") {
        match ChatTemplate::from_folder(folder(&files).path()) {
            Ok(template) => {
                let text = template.map(|template| template.render(&talk(&[("user", "hi")]), false).unwrap());
                assert_eq!((text, error), (rendered, String::new()), "{files}");
            }
            Err(found) => assert!(!error.is_empty() && found.to_string().ends_with(&error), "{files}: {found}"),
        }
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
    let tokenizer = given().0.tokenizer();
    for (source, turns, expected) in table::<(String, Vec<(String, String)>, Vec<String>)>("vectors/turns") {
        let turns: Vec<_> = turns.iter().map(|(role, content)| Message::new(role, content)).collect();
        let by_header = source.contains("<|start_header_id|>");
        for tokenizer in [&tokenizer, &Tokenizer::bytes()].into_iter().take(if by_header { 1 } else { 2 }) {
            assert_eq!(spoken(&plain(&source), tokenizer, &turns).unwrap(), expected, "{source}");
        }
    }
}

/// The last template is as in GLM, where the next role's token ends a turn. In the second to last, a
/// token before the content ends nothing.
#[test]
fn the_token_at_which_turns_end() {
    let tokenizer = given().0.tokenizer();
    for (turn, expected) in [
        ("{{ m.role }}:{{ m.content }}<|eot_id|>\n", Some("<|eot_id|>")),
        ("{{ m.role }}:{% generation %}{{ m.content }}<|eot_id|>\n{% endgeneration %}", Some("<|eot_id|>")),
        ("{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>", Some("<|eot_id|>")),
        ("{{ m.role }}:{{ raise_exception('no') }}", None),
        ("{{ m.role }}:<|eot_id|>{{ m.content }}\n", None),
        ("{{ '<|eot_id|>' if m.role == 'user' else '' }}{{ m.content }}", Some("<|eot_id|>")),
    ] {
        let prompt =
            if turn.contains("m.role }}:") { "{% if add_generation_prompt %}assistant:{% endif %}" } else { "" };
        let end = plain(&format!("{{% for m in messages %}}{turn}{{% endfor %}}{prompt}")).turn_end(&tokenizer);
        assert_eq!(end.map(|id| tokenizer.decode(&[id]).unwrap()).as_deref(), expected, "{turn}");
    }
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
    let tokenizer = given().0.tokenizer();
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
        (chain, "compiling it takes more than 5 seconds"),
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
