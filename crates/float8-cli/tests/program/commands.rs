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

/// WGSL has no bf16, so a cache in it would hold garbage. A software adapter has the machine's
/// memory.
#[test]
fn an_adapter_has_its_limits() {
    if !has_wgpu() {
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

/// Lists that double under several names take no fuel. Their thread cannot be stopped, but the
/// program ends.
#[test]
fn a_template_that_does_not_end_is_an_error() {
    let (folder, lines) = file("lines.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n");
    let template = folder.path().join("t.jinja");
    let doubled = (1..60).map(|i| format!("{{% set a{i} = a{0} + a{0} %}}", i - 1)).collect::<String>();
    std::fs::write(&template, format!("{{% set a0 = [1] %}}{doubled}")).unwrap();
    let template = template.display().to_string();
    let output = float8(&["tokenize", "--tokenizer", "bytes", "--chat-template", &template, "--show", &lines]);
    let expected = "the chat template is not applied: rendering it takes more than 5 seconds";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
}

#[test]
fn flags_of_other_programs_are_suggested_ours() {
    for (arguments, ours) in [
        (&["eval", "run", "--precisions", "f32,bf16"][..], "--compare"),
        (&["resume", "run", "--step", "3"], "--from-step"),
        (&["export", "run", "--dtype", "bf16"], "--format"),
        (&["train", "--max-steps", "3"], "--steps"),
    ] {
        let output = float8(arguments);
        let error = stderr(&output);
        assert!(error.contains("unexpected argument") && error.contains(&format!("'{ours}'")), "{error}");
    }
}

/// Errors of data come before the device is named, and `memory` needs no tokenizer.
#[test]
fn a_command_asks_for_what_it_needs() {
    let (folder, data) = file("a.jsonl", "{\"body\": \"x\"}\n");
    for (data, expected) in
        [(&*data, "a.jsonl:1: neither `text` nor"), ("no/such/folder", "cannot read no/such/folder")]
    {
        let output = float8(&["train", "--device", "cpu", "--data", data]);
        assert!(stderr(&output).contains(expected) && output.stdout.is_empty(), "{}", stderr(&output));
    }
    let config = r#"{"model_type": "llama", "vocab_size": 40000, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu"}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let model = folder.path().display().to_string();
    assert!(stdout(&float8(&["memory", "--device", "cpu", "--model", &model])).contains("peak: "));
}
