//! Commands as given by a user.

use crate::support::{command, file, float8, has_wgpu, small, stderr, stdout, text, train, vectors};

#[test]
fn text_to_ids_and_back() {
    let tokenizer = vectors().join("tokenizer.json").display().to_string();
    let tokenize = |tokenizer: &str, lines: &str, more: &[&str]| {
        let (_folder, lines) = file("lines.jsonl", lines);
        float8(&[&["tokenize", "--tokenizer", tokenizer, &lines], more].concat())
    };
    let lines = "\"<|eot_id|>\"\n\n\"né\\u0000 \\ud83d\\udc69\"\r\n\"\"";
    let [special, text] = [&["--special"][..], &[]].map(|more| tokenize(&tokenizer, lines, more));
    assert!(stdout(&special).starts_with("[4]\n[") && stdout(&special) != stdout(&text), "{}", stdout(&special));
    for ids in [special, text] {
        let back = tokenize(&tokenizer, stdout(&ids), &["--decode"]);
        assert_eq!(stdout(&back), "\"<|eot_id|>\"\n\"né\\u0000 👩\"\n\"\"\n");
    }
    assert_eq!(stdout(&tokenize("bytes", "\"né\"", &[])), "[110,195,169]\n");
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("none").display().to_string();
    for (tokenizer, lines, more, expected) in [
        ("bytes", "\"a\"\n{\"text\": 1}\n", &[][..], "lines.jsonl:2: expected a JSON string"),
        // Half of a surrogate pair is not text.
        ("bytes", "\"\\ud83d\"", &[], "lines.jsonl:1: expected a JSON string"),
        ("bytes", "[97]\n[97, 300]\n", &["--decode"], "lines.jsonl:2: 300 is no token"),
        ("bytes", "[97]", &["--decode", "--special"], "cannot be used with"),
        ("bytes", "\"a\"", &[&*nowhere], "cannot read"),
        (folder.path().to_str().unwrap(), "\"a\"", &[], "has neither tokenizer.json nor tokenizer.model"),
    ] {
        let output = tokenize(tokenizer, lines, more);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

/// Training on a token file equals training on its text.
#[test]
fn a_token_file_is_trained_on_as_its_text_is() {
    let (folder, lines) = file("lines.jsonl", &"{\"body\": \"One line, and then one more.\"}\n".repeat(500));
    let tokens = folder.path().join("new/tokens").display().to_string();
    let tokenize = |more: &[&str]| float8(&[&["tokenize", "--tokenizer", "bytes", "--output", &tokens], more].concat());
    let output = tokenize(&["--field", "body", &lines]);
    assert_eq!(stdout(&output), format!("{tokens}: 1 file, 500 documents, 14,500 tokens\n"));
    let losses = |data: &str| {
        let output = train(&small(data, &["training.steps=2", "data.field=body"])).output().unwrap();
        let loss = |line: &str| Some(line.split_once("loss: ")?.1.split_whitespace().next()?.to_string());
        stdout(&output).lines().filter_map(loss).collect::<Vec<_>>()
    };
    let of_text = losses(&lines);
    assert_eq!(of_text.len(), 3, "two steps and the validation loss: {of_text:?}");
    assert_eq!(losses(&tokens), of_text);
    // Existing folders are not replaced, and token files are not text.
    assert!(stderr(&tokenize(&["--field", "body", &lines])).contains("exists and is not an empty folder"));
    let other = folder.path().join("other").display().to_string();
    let output = float8(&["tokenize", "--tokenizer", "bytes", "--output", &other, &tokens]);
    assert!(stderr(&output).contains("tokens.bin holds tokens already"), "{}", stderr(&output));
}

/// Targets are between marks or in colour. Escape codes in the text are not treated as colour.
#[test]
fn targets_are_shown() {
    let lines = "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\\u001b[1m\"}]}\n";
    let (folder, lines) = file("lines.jsonl", &format!("{lines}{{\"text\": \"one\"}}\n"));
    let template = folder.path().join("t.jinja");
    let source = "{% for m in messages %}{{ m.role }}{{ x }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant{{ x }}:{% endif %}";
    std::fs::write(&template, source).unwrap();
    let template = template.display().to_string();
    let show = |more: &[&str]| {
        let output =
            float8(&[&["tokenize", "--tokenizer", "bytes", "--chat-template", &template, &lines], more].concat());
        stdout(&output).to_string()
    };
    let chat = "--- 1: 23 tokens, 6 targets\nuser:q;assistant:⟦a\\u{1b}[1m;⟧\n";
    assert_eq!(show(&["--show"]), format!("{chat}--- 2: 4 tokens, 3 targets\n⟦one⟧\n"));
    assert_eq!(show(&["--show=1"]), chat);
    let with = show(&["--show=1", "--color", "--chat-template-kwargs", "{\"x\": 1}"]);
    assert_eq!(with, "--- 1: 25 tokens, 6 targets\nuser1:q;assistant1:\u{1b}[32ma\\u{1b}[1m;\u{1b}[0m\n");
}

/// A library's panic becomes an error, and nothing else is printed.
#[test]
fn a_panic_that_is_an_error_is_no_panic() {
    let text = std::fs::read_to_string(vectors().join("tokenizer.json")).unwrap();
    let (begin, unknown) = (r#"{"SpecialToken":{"id":"<|begin_of_text|>""#, r#"{"SpecialToken":{"id":"unknown""#);
    assert!(text.contains(begin));
    let (_folder, tokenizer) = file("tokenizer.json", &text.replace(begin, unknown));
    let (_other, lines) = file("lines.jsonl", "\"a\"");
    let output = float8(&["tokenize", "--tokenizer", &tokenizer, &lines]);
    assert!(stderr(&output).starts_with("error: ") && !stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn train_takes_tokenizers_and_prints_its_configuration() {
    let data = text();
    let tokenizer = format!("data.tokenizer={}", vectors().display());
    for (tokenizer, line) in [("data.tokenizer=bytes", "bytes, 257"), (&*tokenizer, "tokenizer.json, 1001")] {
        let output = train(&small(&data.1, &[tokenizer, "training.steps=2"])).output().unwrap();
        for part in [&*format!("tokenizer: {line} tokens\n"), "step:  2", "validation loss", "sample:"] {
            assert!(stdout(&output).contains(part), "{}", stdout(&output));
        }
    }
    let printed = float8(&["config", "show", "--recipe", "rowwise", "--data", "nowhere"]);
    for part in ["recipe = \"rowwise\"", "paths = [\"nowhere\"]", "decay_ratio = 0.2"] {
        assert!(stdout(&printed).contains(part), "defaults too: {}", stdout(&printed));
    }
}

/// Paths need not be UTF-8, but a configuration must be. The error names the path before training
/// starts.
#[cfg(target_os = "linux")]
#[test]
fn a_path_that_is_not_utf_8_is_named() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"caf\xe9.txt"));
    std::fs::copy(text().1, &path).unwrap();
    let settings = small(folder.path().to_str().unwrap(), &["training.steps=1"]);
    for (flag, key) in [("--data=", "data.paths"), ("--output-dir=", "checkpoint.output_dir")] {
        let mut value = std::ffi::OsString::from(flag);
        value.push(&path);
        let output = train(&settings).arg(value).output().unwrap();
        let error = stderr(&output);
        let name = "caf\\xE9.txt\": a configuration is UTF-8, and this is not: name the folder that it lies in";
        assert!(error.starts_with(&format!("error: {key} = \"")) && error.contains(name), "{error}");
    }
    let hf = folder.path().join(OsStr::from_bytes(b"hf\xe9"));
    std::fs::create_dir(&hf).unwrap();
    std::fs::write(hf.join("config.json"), "{\"dtype\": \"float32\"}").unwrap();
    let output = command(&["generate"]).arg(&hf).output().unwrap();
    assert!(stderr(&output).starts_with("error: model.hf_path = \""), "{}", stderr(&output));
    // Files in a data folder need no UTF-8 names.
    stdout(&train(&settings).output().unwrap());
}

#[test]
fn conversations_without_a_target_are_passed_over() {
    let (folder, template) = file("chat.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
    let path = folder.path().join("chat.jsonl").display().to_string();
    let run = |words: std::ops::Range<usize>, more: &[&str]| {
        let turn = |words| {
            let user = "w ".repeat(words);
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{user}\"}}, {{\"role\": \"assistant\", \"content\": \"yes\"}}]}}\n"
            )
        };
        std::fs::write(&path, words.map(turn).collect::<String>()).unwrap();
        let template = format!("data.chat_template={template}");
        let settings = [&[&*template, "data.tokenizer=bytes", "training.steps=3"], more].concat();
        train(&small(&path, &settings)).output().unwrap()
    };
    // In the second, few sequences have targets; some of these are held out.
    for (words, batches) in [(5..65, "training.eval_batches=8"), (4000..4002, "training.eval_batches=2")] {
        let output = run(words, &[batches]);
        assert!(!stdout(&output).contains("loss:  0.00000"), "{}", stdout(&output));
    }
    // A conversation that cannot have targets is named.
    let unanswered = folder.path().join("unanswered.jsonl");
    std::fs::write(&unanswered, r#"{"messages": [{"role": "user", "content": "what do you say to that?"}]}"#).unwrap();
    let output = run(4000..4002, &[&format!("data.validation=[{:?}]", unanswered.display().to_string())]);
    assert!(stderr(&output).contains("unanswered.jsonl:1: the conversation has nothing that the assistant says"));
}

#[test]
fn several_prompts_are_continued_one_after_another() {
    let (folder, data) = text();
    let run = folder.path().join("run").display().to_string();
    stdout(&train(&small(&data, &["training.steps=2"])).args(["--output-dir", &run]).output().unwrap());
    let generate = |arguments: &[&str]| {
        let fixed = ["generate", &run, "--device", "cpu", "--temperature", "0", "--max-new-tokens", "6"];
        stdout(&float8(&[&fixed, arguments].concat())).to_string()
    };
    let prompts = ["fn main", "one", "println!(\"one, two"];
    let alone = prompts.map(|prompt| generate(&["--prompt", prompt]));
    let of_all: Vec<_> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
    let wanted = [1, 2, 3].map(|number| format!("--- {number} of 3\n{}", alone[number - 1])).concat();
    assert_eq!(generate(&of_all), wanted);
    // A stop string ends the text and is not printed.
    let text = alone[1].strip_prefix("one").unwrap().trim_end_matches('\n');
    let stop: String = text.chars().skip(2).take(2).collect();
    let end = text.find(&stop).unwrap();
    assert_eq!(generate(&["--prompt", "one", "--stop", &stop]), format!("one{}\n", &text[..end]));
    let long = "x".repeat(20_000);
    let output = float8(&["generate", &run, "--device", "cpu", "--prompt", "short", "--prompt", &long]);
    assert!(stderr(&output).contains("with the 20001 tokens of prompt 2 exceeds the model's"), "{}", stderr(&output));
}

#[test]
fn precisions_side_by_side() {
    let (folder, data) = text();
    let run = folder.path().join("run").display().to_string();
    stdout(
        &train(&small(&data, &["training.steps=3"]))
            .args(["--output-dir", &run, "--recipe", "delayed"])
            .output()
            .unwrap(),
    );
    let own = stdout(&float8(&["eval", &run, "--device", "cpu"])).to_string();
    let table = stdout(&float8(&["eval", &run, "--device", "cpu", "--compare"])).to_string();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let row =
        |name: &str| rows.iter().find(|row| row.first() == Some(&name)).unwrap_or_else(|| panic!("{name}: {table}"));
    for precision in trainer::job::EvalPrecision::all() {
        let [_, loss, perplexity, _] = row(&precision.to_string())[..] else { panic!("{table}") };
        let [loss, perplexity]: [f64; 2] = [loss, perplexity].map(|number| number.parse().unwrap());
        assert!((loss.exp() - perplexity).abs() < 1e-4 * perplexity, "{table}");
        let exact: f64 = row("f32")[1].parse().unwrap();
        assert!((loss - exact).abs() < 0.02 * exact, "{table}");
    }
    assert!(own.contains(&format!("validation loss: {}  ", row("delayed")[1])), "{own}{table}");
}

/// WGSL has no bf16, so a cache in it would hold garbage. A software adapter has the machine's
/// memory.
#[test]
fn an_adapter_has_its_limits() {
    if !has_wgpu("an_adapter_has_its_limits") {
        return;
    }
    let data = text();
    let run = data.0.path().join("run").display().to_string();
    stdout(&train(&small(&data.1, &["training.steps=1"])).args(["--output-dir", &run]).output().unwrap());
    let output = float8(&["generate", &run, "--device", "wgpu", "--kv-cache", "bf16"]);
    let error = stderr(&output);
    assert!(error.contains("--kv-cache") && error.contains("choose f32 or e4m3"), "{error}");

    let memory = |arguments: &[&str]| float8(&[&["memory", "--device", "wgpu"], arguments].concat());
    let told = memory(&[]);
    let last = stdout(&told).lines().last().unwrap();
    let adapters = device_select::wgpu_adapters().unwrap();
    let expected = match adapters.iter().find(|adapter| adapter.hardware) {
        Some(gpu) => format!("how much wgpu ({}) has is unknown: --memory-gib says it", gpu.name),
        None => "GiB: fits".into(),
    };
    assert!(last.starts_with("peak: ") && last.ends_with(&expected), "{last}");
    let error = memory(&["--set", "training.param_dtype=bf16"]);
    assert!(stderr(&error).contains("training.param_dtype = bf16: wgpu ("));
}
