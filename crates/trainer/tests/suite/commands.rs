//! Command lines: precision, seeds and checkpoints of existing folders, lengths in epochs, sizes in
//! bytes.

use crate::common::*;
use trainer::cli::Command;

fn job(arguments: &[&str]) -> Result<Job<Decoders>, Error> {
    let command = Command::try_parse_from([&["float8"], arguments].concat()).unwrap();
    command.job(&mut std::io::sink()).map(|job| job.expect("the command has something to do with a model"))
}

fn folder(config: &DecoderConfig, dtype: Option<&str>) -> (TempDir, String) {
    let dir = hf_folder(config, &stored_tensors(config, 1));
    let mut json = hf_json(config);
    json["torch_dtype"] = json!(dtype);
    write_json(&dir.path().join("config.json"), &json);
    let path = dir.path().display().to_string();
    (dir, path)
}

#[test]
fn a_hugging_face_checkpoint_computes_in_its_own_dtype() {
    for (dtype, precision) in [
        (Some("bfloat16"), Precision::Bf16),
        (Some("float32"), Precision::F32),
        // There is no f16 compute: f32 has all of its values.
        (Some("float16"), Precision::F32),
        // The weights are f32.
        (None, Precision::F32),
    ] {
        let (_dir, path) = folder(&tiny(), dtype);
        for command in [&["eval", &path, "--data", &path][..], &["generate", &path]] {
            let of = |arguments: &[&str]| {
                let job = job(&[command, arguments].concat()).unwrap();
                (job.config.training.precision, job.start.may_widen)
            };
            assert_eq!(of(&[]), (precision, true), "{command:?} {dtype:?}");
            assert_eq!(of(&["--precision", "fp8"]), (Precision::Fp8, false));
            assert_eq!(of(&["--set", "training.precision=bf16"]), (Precision::Bf16, false));
            assert_eq!(of(&["--set", "training.precision=bf16", "--precision", "f32"]).0, Precision::F32);
        }
    }
}

#[test]
fn a_hugging_face_checkpoint_has_no_steps() {
    let (_dir, path) = folder(&tiny(), None);
    for (flags, named) in [(&["--from-step", "8"][..], "--from-step 8"), (&["--best"], "--best")] {
        for command in ["eval", "generate"] {
            let text = format!("is a Hugging Face checkpoint: {named} is for the folder of a run");
            refuses(job(&[&[command, &path], flags].concat()), &text);
        }
    }
    refuses(job(&["generate", "/no/such/folder"]), "there is no folder /no/such/folder");
}

#[test]
fn each_call_draws_anew_unless_it_has_a_seed() {
    let (_dir, path) = folder(&tiny(), None);
    let seed = |arguments: &[&str]| job(&[&["generate", &path], arguments].concat()).unwrap().config.training.seed;
    assert_ne!(seed(&[]), seed(&[]));
    assert_eq!(seed(&["--seed", "5"]), 5);
    assert_eq!(seed(&["--set", "training.seed=6"]), 6);
}

#[test]
fn prompts_are_those_of_flags_and_of_a_file() {
    let (dir, path) = folder(&tiny(), None);
    let lines = dir.path().join("prompts.txt");
    let prompts = |arguments: &[&str]| match job(&[&["generate", &path], arguments].concat())?.task {
        Task::Generate { prompts, is_chat: false } => Ok(prompts),
        task => panic!("{task:?}"),
    };
    assert_eq!(prompts(&[]).unwrap(), Vec::<String>::new());
    let file = lines.display().to_string();
    refuses(prompts(&["--prompts", &file]), "cannot read");
    for (text, refusal) in [("a\n\nb\n", "prompts.txt: line 2 is empty"), ("", "has no line")] {
        fs::write(&lines, text).unwrap();
        refuses(prompts(&["--prompts", &file]), refusal);
    }
    refuses(prompts(&["--prompt", ""]), "text 1 must not be empty");
    fs::write(&lines, "\u{feff}two words\n  three\n").unwrap();
    assert_eq!(prompts(&["--prompt", "one", "--prompts", &file]).unwrap(), ["one", "two words", "  three"]);
}

/// As in Hugging Face: missing keys have its defaults, and decoding is greedy without `do_sample`.
#[test]
fn a_checkpoints_generation_config_is_the_default_of_flags() {
    let (dir, path) = folder(&tiny(), None);
    let section = |arguments: &[&str]| job(&[&["generate", &path], arguments].concat()).unwrap().config.generate;
    assert_eq!(section(&[]), GenerateSection::default());
    let config = dir.path().join("generation_config.json");
    write_json(&config, &json!({ "eos_token_id": [1, 2], "temperature": 0.6, "transformers_version": "5.0.0" }));
    let of_file = section(&[]);
    assert_eq!((of_file.temperature, of_file.filters.top_k, of_file.filters.top_p), (0.0, NonZero::new(50), 1.0));
    write_json(
        &config,
        &json!({ "do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": null, "min_p": 0.05,
                 "repetition_penalty": 1.1, "max_new_tokens": 7 }),
    );
    let filters = Filters { repetition_penalty: 1.1, top_k: NonZero::new(50), top_p: 0.9, min_p: 0.05 };
    let of_file = GenerateSection { max_new_tokens: 7, temperature: 0.6, filters, ..GenerateSection::default() };
    assert_eq!(section(&[]), of_file);
    let flags = [
        &["--temperature", "0.5", "--top-k", "3", "--top-p", "0.8", "--min-p", "0", "--repetition-penalty", "1"][..],
        &["--max-new-tokens", "9", "--stop", "a", "--stop", "b", "--kv-cache", "bf16"],
    ];
    let of_flags = GenerateSection {
        max_new_tokens: 9,
        temperature: 0.5,
        filters: Filters { top_k: NonZero::new(3), top_p: 0.8, ..Filters::default() },
        stop: vec!["a".into(), "b".into()],
        kv_cache: Some(CacheDtype::Bf16),
        ..GenerateSection::default()
    };
    assert_eq!(section(&flags.concat()), of_flags);
    let set = section(&["--set", "generate.temperature=0.1"]);
    assert_eq!(set, GenerateSection { temperature: 0.1, ..of_file });
    for (json, text) in [(json!({ "top_k": "many" }), "top_k = \"many\""), (json!({ "top_p": 1.5 }), "top_p = 1.5")] {
        write_json(&config, &json);
        refuses(job(&["generate", &path]), &format!("{}: {text} is not supported", config.display()));
    }
    // Other commands do not read the file.
    assert!(job(&["eval", &path, "--data", &path]).is_ok());
}

/// Keys whose value has no effect are not reported.
#[test]
fn a_generation_config_that_says_more_is_told() {
    let (dir, _) = folder(&tiny(), None);
    let read = |json| {
        write_json(&dir.path().join("generation_config.json"), &json);
        GenerateSection::default().with_file_of(dir.path()).unwrap()
    };
    let (section, ignored) = read(json!({ "top_k": -1, "num_beams": 1, "no_repeat_ngram_size": 0, "eos_token_id": 2,
                                          "bad_words_ids": null, "suppress_tokens": [] }));
    assert_eq!((section.filters.top_k, ignored), (None, None));
    let (_, ignored) = read(json!({ "suppress_tokens": [3], "no_repeat_ngram_size": 2, "num_beams": 4, "top_k": 0 }));
    assert!(ignored.unwrap().ends_with(": no_repeat_ngram_size, num_beams, suppress_tokens"));
}

#[test]
fn precisions_are_compared_by_name() {
    let (_dir, path) = folder(&tiny(), None);
    let precisions = |arguments: &[&str]| {
        let command = Command::try_parse_from([&["float8", "eval", &path, "--data", &path], arguments].concat())?;
        let Task::Evaluate { precisions, .. } = command.job::<Decoders>(&mut std::io::sink()).unwrap().unwrap().task
        else {
            panic!()
        };
        Ok::<_, clap::Error>(precisions)
    };
    assert_eq!(precisions(&[]).unwrap(), []);
    assert_eq!(precisions(&["--compare"]).unwrap(), EvalPrecision::all());
    let named = precisions(&["--compare", "bf16,rowwise,f32"]).unwrap();
    assert_eq!(named, [EvalPrecision::Bf16, EvalPrecision::Fp8(Recipe::Rowwise), EvalPrecision::F32]);
    let error = precisions(&["--compare", "f32,fp4"]).unwrap_err().to_string();
    assert!(error.contains("fp4") && error.contains("there are f32, bf16, tensorwise, rowwise"), "{error}");
    assert!(precisions(&["--compare", "f32", "--precision", "f32"]).is_err());
    // The list option consumes the following argument.
    let error = Command::try_parse_from(["float8", "eval", "--data", &path, "--compare", &path]).unwrap_err();
    let wanted = format!("{path} looks like the folder of the model, which goes before --compare");
    assert!(error.to_string().contains("there are f32, bf16") && error.to_string().contains(&wanted), "{error}");
}

#[test]
fn sizes_of_shards_may_have_units() {
    let (_dir, path) = folder(&tiny(), None);
    let export = |size: &str| {
        Command::try_parse_from(["float8", "export", &path, "--output", "out", "--max-shard-size", size])
            .map(|command| command.job::<Decoders>(&mut std::io::sink()).unwrap().unwrap().task)
    };
    let sizes = [("5000", 5000), ("5MB", 5_000_000), ("1.5 GB", 1_500_000_000), ("2KiB", 2048), ("3GiB", 3 << 30)];
    for (size, bytes) in sizes {
        let Ok(Task::Export { options: ExportOptions { max_shard_bytes, .. }, .. }) = export(size) else {
            panic!("{size}")
        };
        assert_eq!(max_shard_bytes, bytes, "{size}");
    }
    for size in ["", "5 cats", "MB", "0", "-1", "0.1"] {
        assert!(export(size).is_err(), "{size}");
    }
}

#[test]
fn a_length_may_be_in_epochs() {
    let steps =
        |arguments: &[&str]| job(&[&["train", "--data", "text"], arguments].concat()).unwrap().config.training.steps;
    assert_eq!(steps(&["--epochs", "3"]), "3 epochs".parse().unwrap());
    assert_eq!(steps(&["--steps", "1 epoch"]), "1 epoch".parse().unwrap());
    // The number of steps is not known yet, so checks that depend on it are deferred.
    let schedule = ["--set", "float8.schedule={ warmup = 700 }", "--set", "training.profile_steps=[700, 701]"];
    let epochs = ["--set", "training.steps=2 epochs"];
    assert_eq!(steps(&[&epochs[..], &schedule].concat()).epochs(), Some(2.0));
    assert!(job(&["train", "--set", "float8.schedule={ warmup = 700 }"]).is_err());
}
