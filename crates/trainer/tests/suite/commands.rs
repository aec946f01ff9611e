//! Command lines: the configuration, the checkpoint and the task that they name, and refusals.

use crate::common::*;

/// Command line with the files beside it. `HF` is a checkpoint's folder, `TOML` a configuration,
/// `PROMPTS` a file of prompts.
#[derive(Deserialize)]
struct Row {
    args: Vec<String>,
    /// Dtype in the checkpoint's config.json.
    #[serde(default)]
    dtype: Value,
    /// The checkpoint's generation_config.json.
    generation: Option<Value>,
    #[serde(default)]
    toml: String,
    #[serde(default)]
    prompts: String,
    /// Values of keys.
    #[serde(default)]
    is: BTreeMap<String, Value>,
    /// Parts of the error.
    says: Option<Vec<String>>,
}

/// Keys of a job: the ones of its configuration, and what its task and start have.
fn job(args: &[String]) -> Result<Value, String> {
    let command =
        Command::try_parse_from([&["float8".to_string()], args].concat()).map_err(|error| error.to_string())?;
    let job = command.job::<Decoders>(&mut std::io::sink()).map_err(chain)?.expect("a model");
    let mut keys = serde_json::to_value(job.config.to_toml().unwrap().parse::<Table>().unwrap()).unwrap();
    keys["may_widen"] = job.start.may_widen.into();
    match job.task {
        Task::Generate { prompts, .. } => {
            let GenerateSection { temperature, filters, stop, kv_cache, .. } = job.config.generate;
            let Filters { repetition_penalty, top_k, top_p, min_p } = filters;
            keys["prompts"] = prompts.into();
            keys["filters"] = json!({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
                                     "stop": stop, "kv_cache": kv_cache.map(|dtype| format!("{dtype:?}"))});
        }
        Task::Evaluate { precisions, .. } => {
            keys["precisions"] = precisions.iter().map(|precision| format!("{precision:?}")).collect();
        }
        Task::Export { options, .. } => keys["max_shard_bytes"] = options.max_shard_bytes.into(),
        _ => {}
    }
    Ok(keys)
}

#[test]
fn command_lines_become_jobs() {
    let dir = hf_folder(&tiny(), &stored_tensors(&tiny(), 1));
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut wrong = vec![];
    for row in table::<Row>("vectors/command_lines") {
        let mut json = hf_json(&tiny());
        json["torch_dtype"] = row.dtype;
        write_json(&dir.path().join("config.json"), &json);
        let generation = path("generation_config.json");
        match &row.generation {
            Some(json) => write_json(generation.as_ref(), json),
            None => drop(fs::remove_file(generation)),
        }
        fs::write(path("run.toml"), row.toml).unwrap();
        fs::write(path("prompts.txt"), row.prompts).unwrap();
        let files = |text: &String| {
            let text = text.replace("HF", &dir.path().display().to_string());
            text.replace("TOML", &path("run.toml")).replace("PROMPTS", &path("prompts.txt"))
        };
        let args: Vec<_> = row.args.iter().map(files).collect();
        let says = row.says.map(|says| says.iter().map(files).collect::<Vec<_>>());
        let unmet: Vec<String> = match (job(&args), says) {
            (Ok(keys), None) => {
                let found = |key: &String| key.split('.').fold(&keys, |table, key| &table[key]);
                let wrong = row.is.iter().filter(|(key, value)| found(key) != *value);
                wrong.map(|(key, _)| format!("{key} is {}", found(key))).collect()
            }
            (Err(error), Some(says)) if says.iter().all(|part| error.contains(part)) => vec![],
            (other, _) => vec![format!("{:?}", other.map(|_| "no error"))],
        };
        wrong.extend((!unmet.is_empty()).then(|| format!("{args:?}: {}", unmet.join(", "))));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_call_draws_anew() {
    let dir = hf_folder(&tiny(), &stored_tensors(&tiny(), 1));
    let args = ["generate".to_string(), dir.path().display().to_string()];
    let [one, other] = [(); 2].map(|()| job(&args).unwrap()["training"]["seed"].clone());
    assert_ne!(one, other);
}

/// Keys whose value has no effect are not reported.
#[test]
fn a_generation_config_that_says_more_is_told() {
    let dir = tempfile::tempdir().unwrap();
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
