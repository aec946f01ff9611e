//! Commands as given by a user.

use train::metrics::read_metrics;

use crate::support::{command, file, has_wgpu, llama3, small, small_on, stderr, stdout, text, train, vectors};

#[test]
fn text_to_ids_and_back() {
    let tokenizer = vectors().join("tokenizer.json").display().to_string();
    let (_folder, lines) = file("lines.jsonl", "\"<|eot_id|>\"\n\n\"né\\u0000 \\ud83d\\udc69\"\r\n\"\"");
    let special = llama3(&["tokenize", "--tokenizer", &tokenizer, "--special", &lines]);
    assert!(stdout(&special).starts_with("[4]\n["), "{}", stdout(&special));
    let text = llama3(&["tokenize", "--tokenizer", &tokenizer, &lines]);
    assert_ne!(stdout(&text), stdout(&special));
    assert_eq!(stdout(&text).lines().count(), 3);
    for ids in [special, text] {
        let (_folder, ids) = file("lines.jsonl", stdout(&ids));
        let back = llama3(&["tokenize", "--tokenizer", &tokenizer, "--decode", &ids]);
        assert_eq!(stdout(&back), "\"<|eot_id|>\"\n\"né\\u0000 👩\"\n\"\"\n");
    }
    let (_folder, lines) = file("lines.jsonl", "\"né\"");
    assert_eq!(stdout(&llama3(&["tokenize", "--tokenizer", "bytes", &lines])), "[110,195,169]\n");
}

#[test]
fn what_cannot_be_tokenized_is_named() {
    let tokenize = |arguments: &[&str]| {
        let output = llama3(&[&["tokenize", "--tokenizer"], arguments].concat());
        stderr(&output).to_string()
    };
    let (folder, lines) = file("lines.jsonl", "\"a\"\n{\"text\": 1}\n");
    assert!(tokenize(&["bytes", &lines]).contains("lines.jsonl:2: expected a JSON string"));
    let (_other, ids) = file("lines.jsonl", "[97]\n[97, 300]\n");
    assert!(tokenize(&["bytes", "--decode", &ids]).contains("lines.jsonl:2: 300 is no token"));
    let folder = folder.path().display().to_string();
    assert!(tokenize(&[&folder, &lines]).contains("has neither tokenizer.json nor tokenizer.model"));
    assert!(tokenize(&["bytes", &format!("{folder}/none")]).contains("cannot read"));
    assert!(tokenize(&["bytes", "--special", "--decode", &ids]).contains("cannot be used with"));
    // Half of a surrogate pair is not text.
    let (_half, lines) = file("lines.jsonl", "\"\\ud83d\"");
    assert!(tokenize(&["bytes", &lines]).contains("lines.jsonl:1: expected a JSON string"));
}

/// Training on a token file equals training on its text.
#[test]
fn a_token_file_is_trained_on_as_its_text_is() {
    let (folder, lines) = file("lines.jsonl", &"{\"body\": \"One line, and then one more.\"}\n".repeat(500));
    let tokens = folder.path().join("new/tokens").display().to_string();
    let tokenize = |more: &[&str]| llama3(&[&["tokenize", "--tokenizer", "bytes", "--to", &tokens], more].concat());
    let output = tokenize(&["--field", "body", &lines]);
    assert_eq!(stdout(&output), format!("{tokens}: 1 file, 500 documents, 14,500 tokens\n"));
    let losses = |data: &str| {
        let metrics = folder.path().join("metrics.jsonl");
        let settings = ["training.steps=2", "data.field=body", &*format!("training.metrics={}", metrics.display())];
        stdout(&train(&small(data, &settings)).output().unwrap());
        let records = read_metrics(&metrics).unwrap();
        std::fs::remove_file(metrics).unwrap();
        records
            .iter()
            .map(|record| (record.train.as_ref().map(|train| train.loss), record.held_out_loss))
            .collect::<Vec<_>>()
    };
    let of_text = losses(&lines);
    assert_eq!(of_text.iter().filter(|(loss, _)| loss.is_some()).count(), 2);
    assert!(of_text.iter().any(|(_, held_out)| held_out.is_some()));
    assert_eq!(losses(&tokens), of_text);
    // Existing folders are not replaced, and token files are not text.
    assert!(stderr(&tokenize(&["--field", "body", &lines])).contains("exists and is not an empty folder"));
    let other = folder.path().join("other").display().to_string();
    let output = llama3(&["tokenize", "--tokenizer", "bytes", "--to", &other, &tokens]);
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
            llama3(&[&["tokenize", "--tokenizer", "bytes", "--chat-template", &template, &lines], more].concat());
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
    let output = llama3(&["tokenize", "--tokenizer", &tokenizer, &lines]);
    assert!(stderr(&output).starts_with("error: ") && !stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn train_takes_what_the_example_takes() {
    let data = text();
    let run = |tokenizer: &str| {
        let output = train(&small(&data.1, &[tokenizer, "training.steps=2"])).output().unwrap();
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
    for (flag, key) in
        [("--data", "data.paths"), ("--checkpoints", "checkpoint.folder"), ("--report", "training.report")]
    {
        let output = train(&settings).arg(flag).arg(&path).output().unwrap();
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
    let long = |words: usize| {
        let user = "w ".repeat(words);
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{user}"}}, {{"role": "assistant", "content": "yes"}}]}}"#
        ) + "\n"
    };
    let path = folder.path().join("chat.jsonl");
    std::fs::write(&path, (0..60).map(|i| long(5 + i)).collect::<String>()).unwrap();
    let settings = [format!("data.chat_template={template}"), "data.tokenizer=bytes".into(), "training.steps=3".into()];
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let run = |more: &[&str]| train(&small(path.to_str().unwrap(), &[&settings[..], more].concat())).output().unwrap();
    let output = run(&["training.eval_batches=8"]);
    assert!(!stdout(&output).contains("loss:  0.00000"), "{}", stdout(&output));
    // Few sequences have targets; some of these are held out.
    std::fs::write(&path, format!("{}{}", long(4000), long(4000))).unwrap();
    let output = run(&["training.eval_batches=2"]);
    assert!(!stdout(&output).contains("loss:  0.00000"), "{}", stdout(&output));
    // A conversation that cannot have targets is named.
    let unanswered = folder.path().join("unanswered.jsonl");
    std::fs::write(&unanswered, r#"{"messages": [{"role": "user", "content": "what do you say to that?"}]}"#).unwrap();
    let output =
        run(&["training.eval_batches=2", &format!("data.validation=[{:?}]", unanswered.display().to_string())]);
    assert!(stderr(&output).contains("unanswered.jsonl:1: the conversation has nothing that the assistant says"));
}

#[test]
fn several_prompts_are_continued_one_after_another() {
    let (folder, data) = text();
    let run = folder.path().join("run").display().to_string();
    stdout(&train(&small(&data, &["training.steps=2"])).args(["--checkpoints", &run]).output().unwrap());
    let generate = |arguments: &[&str]| {
        let fixed = ["generate", &run, "--device", "cpu", "--temperature", "0", "--max-new-tokens", "6"];
        stdout(&llama3(&[&fixed, arguments].concat())).to_string()
    };
    let prompts = ["fn main", "one", "println!(\"one, two"];
    let alone = prompts.map(|prompt| generate(&["--prompt", prompt]));
    let of_all: Vec<_> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
    let wanted = [1, 2, 3].map(|number| format!("--- {number} of 3\n{}", alone[number - 1])).concat();
    assert_eq!(generate(&of_all), wanted);
    let together = generate(&[&of_all[..], &["--set", "generate.together=true"]].concat());
    assert_eq!(together.lines().filter(|line| line.starts_with("--- ")).count(), 3, "{together}");
    // A stop string ends the text and is not printed.
    let text = alone[1].strip_prefix("one").unwrap().trim_end_matches('\n');
    let stop: String = text.chars().skip(2).take(2).collect();
    let end = text.find(&stop).unwrap();
    assert_eq!(generate(&["--prompt", "one", "--stop", &stop]), format!("one{}\n", &text[..end]));
    let long = "x".repeat(20_000);
    let output = llama3(&["generate", &run, "--device", "cpu", "--prompt", "short", "--prompt", &long]);
    assert!(stderr(&output).contains("with the 20001 tokens of prompt 2 exceeds the model's"), "{}", stderr(&output));
}

#[test]
fn precisions_side_by_side() {
    let (folder, data) = text();
    let run = folder.path().join("run").display().to_string();
    stdout(
        &train(&small(&data, &["training.steps=3"]))
            .args(["--checkpoints", &run, "--recipe", "delayed"])
            .output()
            .unwrap(),
    );
    let own = stdout(&llama3(&["eval", &run, "--device", "cpu"])).to_string();
    let table = stdout(&llama3(&["eval", &run, "--device", "cpu", "--precisions"])).to_string();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let row =
        |name: &str| rows.iter().find(|row| row.first() == Some(&name)).unwrap_or_else(|| panic!("{name}: {table}"));
    for precision in train::job::EvalPrecision::all() {
        let [_, loss, perplexity, _] = row(&precision.to_string())[..] else { panic!("{table}") };
        let [loss, perplexity]: [f64; 2] = [loss, perplexity].map(|number| number.parse().unwrap());
        assert!((loss.exp() - perplexity).abs() < 1e-4 * perplexity, "{table}");
        let exact: f64 = row("f32")[1].parse().unwrap();
        assert!((loss - exact).abs() < 0.02 * exact, "{table}");
    }
    assert!(own.contains(&format!("held-out loss: {}  ", row("delayed")[1])), "{own}{table}");
}

/// WGSL has no bf16, so such a cache would hold garbage.
#[test]
fn a_cache_that_a_gpu_cannot_read_is_refused() {
    if !has_wgpu("a_cache_that_a_gpu_cannot_read_is_refused") {
        return;
    }
    let data = text();
    let output = train(&small_on("wgpu", &data.1, &["training.steps=1", "generate.kv_cache=bf16"])).output().unwrap();
    let error = stderr(&output);
    assert!(error.contains("generate.kv_cache") && error.contains("choose f32 or e4m3"), "{error}");
}

/// A software adapter has the machine's memory.
#[test]
fn memory_is_told_of_the_adapter_that_is_here() {
    if !has_wgpu("memory_is_told_of_the_adapter_that_is_here") {
        return;
    }
    let memory = |arguments: &[&str]| llama3(&[&["memory", "--device", "wgpu"], arguments].concat());
    let told = memory(&[]);
    let last = stdout(&told).lines().last().unwrap();
    let adapters = device_select::wgpu_adapters().unwrap();
    let expected = match adapters.iter().find(|adapter| adapter.hardware) {
        Some(gpu) => format!("how much wgpu ({}) has is unknown: --available says it", gpu.name),
        None => "GiB: fits".into(),
    };
    assert!(last.starts_with("peak: ") && last.ends_with(&expected), "{last}");
    let error = memory(&["--set", "training.param_dtype=bf16"]);
    assert!(stderr(&error).contains("training.param_dtype = bf16: wgpu (") && !error.status.success());
}
