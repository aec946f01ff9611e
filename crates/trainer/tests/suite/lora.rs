//! Training of adapters: the base is unchanged, checkpoints contain only adapters, and PEFT reads
//! them.

use crate::common::*;
use crate::float8_exports::json_file;
use crate::float8_python::run_python;

const LORA: [&str; 2] = ["lora.rank=4", "lora.alpha=8"];

/// Run of adapters with these settings, saved in `folder`.
fn config(data: &Path, folder: &Path, settings: &[&str]) -> RunConfig {
    let folder = saved(folder);
    run_config(data, &[&LORA[..], &["optimizer.lr=1e-2", "generate.max_new_tokens=0", &folder], settings].concat())
}

fn losses(config: &RunConfig) -> Vec<u64> {
    let (outcome, _) = run(config).unwrap();
    outcome.steps.iter().map(|line| line.loss.to_bits()).chain(outcome.validation_loss.map(f64::to_bits)).collect()
}

#[test]
fn adapters_learn_and_are_all_that_is_saved() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let settings = ["lora.dropout=0.1", "data.tokenizer=bytes"];
    let (outcome, _) = run(&config(data.path(), &folder.path().join("run"), &settings)).unwrap();
    let (first, last) = (outcome.steps.first().unwrap().loss, outcome.steps.last().unwrap().loss);
    assert!(last < first - 0.05, "{first} to {last}");
    let checkpoint = folder.path().join("run/step-000000012");
    for (file, names) in [("model.safetensors", 28), ("optimizer.safetensors", 56)] {
        let files = TensorFiles::open_file(checkpoint.join(file)).unwrap();
        assert_eq!(files.names().count(), names, "{file}");
        assert!(files.names().all(|name| name.starts_with("lora.adapters.")), "{file}");
    }
    // Dropout is disabled in evaluation.
    let printed = float8(&["eval", folder.path().join("run").to_str().unwrap()]).unwrap();
    let held_out = format!("validation loss: {:.5}", outcome.validation_loss.unwrap());
    assert!(printed.contains(&held_out) && printed.contains("checkpoint: step 12\n"), "{printed}: {held_out}");
}

#[test]
fn segments_and_a_base_of_codes_are_the_same_bits() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    // Codes are the same where both GEMMs share one copy of a weight.
    for (recipe, is_shared) in [("tensorwise", true), ("blockwise", true), ("delayed", false)] {
        let recipe = format!("float8.recipe={recipe}");
        let mut number = 0;
        let mut losses = |settings: &[&str]| {
            number += 1;
            let path = folder.path().join(format!("{}-{number}", &recipe[14..]));
            losses(&config(data.path(), &path, &[&["lora.dropout=0.1", &recipe], settings].concat()))
        };
        let plain = losses(&[]);
        assert_eq!(losses(&["training.activation_checkpointing=full", "training.loss_chunk=96"]), plain, "{recipe}");
        assert!(!is_shared || losses(&["lora.base=fp8"]) == plain, "{recipe}");
        assert_ne!(losses(&["training.seed=5"]), plain, "{recipe}");
    }
}

/// Base weights never change, and the first linears after a frozen embedding have no backward; with
/// adapters only on the output layer, no linear has one. Still, each step is an FP8 step: histories
/// have an amax of each. A merge has scales of its weights, not of the base's histories.
#[test]
fn each_step_is_one_of_fp8() {
    for targets in ["all-linear", "lm_head"] {
        let (data, folder) = (text(), TempDir::new().unwrap());
        let at = |name: &str| folder.path().join(name).display().to_string();
        let targets = format!("lora.target_modules={targets}");
        let settings = ["float8.recipe=delayed", "training.steps=4", "data.tokenizer=bytes", &targets, "lora.alpha=64"];
        run(&config(data.path(), at("run").as_ref(), &settings)).unwrap();
        let state: Value = json_file(&folder.path().join("run/step-000000004/state.json"));
        assert_eq!(state["float8"]["step"], 5, "the next step has begun");
        for linear in ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"] {
            let history = &state["float8"]["layers"][format!("base.{linear}")]["input"]["history"];
            assert_eq!(history.as_array().expect(linear).iter().filter(|amax| **amax != 0).count(), 4, "{history}");
        }
        let [merged, exact] = ["fp8", "f32"].map(|format| {
            let to = at(format);
            let flags = ["--merge-adapters", "--format", format];
            let out = exported(at("run"), &to, &flags).unwrap();
            assert_eq!(out.contains("static inputs"), format == "fp8", "{out}");
            TensorFiles::open_folder(to).unwrap()
        });
        let read =
            |files: &TensorFiles, own| files.get(&format!("model.layers.1.mlp.down_proj.{own}")).unwrap().to_f32();
        let largest = read(&exact, "weight").unwrap().into_iter().fold(0.0, |max: f32, value| max.max(value.abs()));
        let scale = read(&merged, "weight_scale").unwrap()[0];
        assert!((448.0 * scale / largest - 1.0).abs() < 1e-6, "{scale} of {largest}");
    }
}

/// With codes and unchanged scales, small updates are lost by rounding; in f32 nothing is lost.
#[test]
fn merging_says_what_rounding_leaves() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let at = |name: &str| folder.path().join(name);
    let left = |from: &str, flags: &[&str]| {
        let (from, to) = (at(from), at(&format!("{from} by {}", flags.join(" "))));
        let out = exported(from, &to, flags).unwrap();
        let share = out.split_once("rounding leaves ").map(|(_, rest)| rest.split_once(' ').unwrap().0.parse::<f64>());
        (to, out.contains("--recipe of other scales"), share.map(Result::unwrap))
    };
    let settings = ["training.steps=2", "data.tokenizer=bytes", "float8.recipe=rowwise"];
    let whole = saved(at("whole"));
    run(&run_config(data.path(), &[&settings[..], &["generate.max_new_tokens=0", &whole]].concat())).unwrap();
    let (codes, _, none) = left("whole", &["--format", "fp8"]);
    assert_eq!(none, None);
    let mut small = config(data.path(), &at("small"), &[&settings[..], &["optimizer.lr=1e-5"]].concat());
    small.model = trainer::ModelSection::of_folder(codes, serde_json::Map::new());
    run(&small).unwrap();
    let (_, is_advised, share) = left("small", &["--merge-adapters", "--format", "fp8"]);
    assert!(is_advised && share.unwrap() < 50.0, "{share:?}");
    let (_, is_advised, share) = left("small", &["--merge-adapters", "--format", "f32"]);
    assert!(!is_advised && share == Some(100.0), "{share:?}");
}

/// In precisions other than FP8 the base has its values, in a table and in a single evaluation. A
/// row notes that `delayed` has no histories.
#[test]
fn a_run_on_codes_is_judged_in_every_precision() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let path = folder.path().join("run");
    let settings = ["lora.base=fp8", "float8.recipe=rowwise", "training.steps=1", "data.tokenizer=bytes"];
    run(&config(data.path(), &path, &settings)).unwrap();
    let path = path.to_str().unwrap();
    let table = float8(&["eval", path, "--compare", "f32,tensorwise,delayed"]).unwrap();
    let row = |name: &str| {
        let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.find(|row| row.first() == Some(&name)).unwrap_or_else(|| panic!("{table}"))
    };
    let alone = printed_loss(&float8(&["eval", path, "--precision", "f32"]).unwrap());
    assert_eq!(format!("{alone:.5}"), row("f32")[1]);
    assert!((alone.exp() / row("f32")[2].parse::<f64>().unwrap() - 1.0).abs() < 1e-4, "{table}");
    assert_eq!((row("tensorwise").len(), row("tensorwise")[1]), (4, row("delayed")[1]));
    assert!(row("delayed").join(" ").ends_with("% no histories: scaled as tensorwise"), "{table}");
}

/// The adapter and the merged weights of a run, each in a run of no steps. A run of adapters resumes
/// only with the same files of its base.
#[test]
fn an_exported_adapter_and_merged_weights_give_the_same_loss() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [run_folder, adapter, merged, second] = ["run", "adapter", "merged", "second"].map(path);
    let fixed = ["training.precision=f32", "data.tokenizer=bytes"];
    let want = run(&config(data.path(), run_folder.as_ref(), &fixed)).unwrap().0.validation_loss.unwrap();
    exported(&run_folder, &adapter, &[]).unwrap();
    exported(&run_folder, &merged, &["--merge-adapters", "--format", "f32"]).unwrap();
    let mut names: Vec<_> = fs::read_dir(&adapter).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    let zero = |settings: &[&str]| run_config(data.path(), &[&fixed[..], &["training.steps=0"], settings].concat());
    let again = run(&zero(&[LORA[0], LORA[1], &format!("lora.adapter={adapter}")])).unwrap().0;
    assert_eq!(format!("{:.5}", again.validation_loss.unwrap()), format!("{want:.5}"));
    let mut of_merged = zero(&[]);
    of_merged.model = trainer::ModelSection::of_folder(merged.clone().into(), serde_json::Map::new());
    assert!((run(&of_merged).unwrap().0.validation_loss.unwrap() - want).abs() < 2e-5);

    let settings = ["training.precision=f32", "training.steps=1", "data.tokenizer=bytes"];
    let mut of_base = config(data.path(), second.as_ref(), &settings);
    of_base.model = of_merged.model;
    run(&of_base).unwrap();
    assert!(!float8(&["eval", &second]).unwrap().contains("warning"));
    let weights = format!("{merged}/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    refuses(float8(&["eval", &second]), &format!("{weights}: it has other contents since this run began"));
    // Flags for weights are refused for adapters only.
    for flags in [&["--format", "f32"][..], &["--max-shard-size", "1MB"]] {
        let to = path("refused");
        refuses(exported(&second, &to, flags), &format!("{} = ", flags[0]));
        assert!(!fs::exists(&to).unwrap());
    }
    fs::remove_dir_all(&merged).unwrap();
    refuses(float8(&["eval", &second]), &format!("there is no folder {merged}, which has the weights"));
}

type Adapted = trainer::Adapted<Train, Decoder<Train>>;

/// PEFT's adapter in [`vectors`] on the checkpoint in `tests/goldens/hf_llama`.
fn of_peft(settings: &[&str]) -> Result<(RunConfig, Adapted), Error> {
    let base = format!("model.hf_path={}", base().display());
    let adapter = format!("lora.adapter={}", vectors().display());
    let given = ["training.precision=f32", &base, &adapter];
    let settings: Vec<_> = given.iter().chain(settings).map(|s| s.to_string()).collect();
    let config = RunConfig::load(None, &settings)?;
    let weights = Weights::open(&config, None, config.dimensions()?)?;
    let (progress, out) = (ProgressLine::hidden(), &mut std::io::sink());
    let model = prepare::<Decoders, Train>(&config, weights, &Default::default(), &progress, out)?;
    let lora = config.lora.as_ref().expect("it is given");
    let adapted = trainer::job::adapt::<Train, _>(lora, without_float8(model), config.training.seed, None)?;
    Ok((config, adapted))
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/peft")
}

fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/hf_llama")
}

fn reference() -> (Vec<i32>, Vec<f32>) {
    let files = TensorFiles::open_file(vectors().join("reference.safetensors")).unwrap();
    let ids = files.get("input_ids").unwrap().bytes().unwrap();
    let ids = ids.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    (ids, files.get("logits").unwrap().to_f32().unwrap())
}

fn logits(adapted: &Adapted, input: &[i32]) -> Vec<f32> {
    values(adapted.attached().forward(ids(input, [2, 24])).inner())
}

/// Ours and PEFT's logits of one adapter; then PEFT, if Python has it, reads an adapter of new
/// values, and `peft_vectors.py` checks every tensor and our logits.
#[test]
fn peft_gives_the_same_logits() {
    let (input, want) = reference();
    let (_, mut adapted) = of_peft(&[]).unwrap();
    let got = logits(&adapted, &input);
    assert!(relative(&got, &want) < 1e-5, "{}", relative(&got, &want));
    let merged = values(adapted.merged().forward(ids(&input, [2, 24])).inner());
    assert!(relative(&merged, &got) < 1e-6, "{}", relative(&merged, &got));
    // Writing it again gives the same tensors as PEFT's.
    let dir = TempDir::new().unwrap();
    let [same, folder] = ["same", "adapter"].map(|name| dir.path().join(name));
    adapted.save_peft(None, &same).unwrap();
    let [ours, theirs] =
        [&same, &vectors()].map(|folder| TensorFiles::open_file(folder.join("adapter_model.safetensors")).unwrap());
    assert!(ours.names().eq(theirs.names()));
    for name in theirs.names() {
        let [ours, theirs] = [&ours, &theirs].map(|files| files.get(name).unwrap());
        assert_eq!((ours.shape(), ours.bytes().unwrap()), (theirs.shape(), theirs.bytes().unwrap()), "{name}");
    }
    adapted.lora = Module::<Train>::map(adapted.lora, &mut Halve);
    let got = logits(&adapted, &input);
    assert!(relative(&got, &want) > 1e-2, "another adapter than PEFT's own");
    adapted.save_peft(None, &folder).unwrap();
    let bytes = input.iter().flat_map(|id| id.to_le_bytes()).collect();
    let input = Stored { name: "input_ids".into(), dtype: Dtype::I32, shape: vec![2, 24], bytes };
    let logits = Stored::f32("logits", &[2, 24, want.len() / 48], &got);
    write_safetensors(&folder.join("reference.safetensors"), &[input, logits]);
    run_python("peft_vectors.py", "peft, transformers", &[folder.as_os_str()]);
}

/// Multiplies each element by a half, exactly.
struct Halve;

impl ModuleMapper<Train> for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Train, D>>) -> Param<Tensor<Train, D>> {
        param.map(|tensor| tensor.mul_scalar(0.5))
    }
}

/// A row has settings, or changes of the adapter's configuration, and the text of the error.
#[test]
fn adapters_that_do_not_fit_are_refused() {
    for (setting, changes, told) in table::<(String, Value, String)>("refusals/adapters") {
        let folder = edited(&changes);
        let adapter = format!("lora.adapter={}", folder.path().display());
        refuses(of_peft(&[&*adapter, &setting][..1 + usize::from(!setting.is_empty())]), &told);
    }
}

/// PEFT's adapter with changes in its configuration.
fn edited(changes: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(vectors().join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("adapter_config.json");
    let mut json = json_file(&path);
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    write_json(&path, &json);
    folder
}

/// Rank, alpha and targets are read from the file in every form that PEFT has, and written again.
#[test]
fn an_adapter_says_what_it_is() {
    let (ids, want) = reference();
    let pattern = r"model\.layers\.\d+\.(mlp\.down|self_attn\.(q|v))_proj";
    for changes in [
        json!({"target_modules": pattern, "use_dora": null, "new_flag": false}),
        // α / √r.
        json!({"use_rslora": true, "lora_alpha": 3}),
        json!({"rank_pattern": {"q_proj|v_proj": 4, "mlp.down_proj": 4}, "r": 2, "alpha_pattern": {".*": 6}, "lora_alpha": 1}),
        json!({"rank_pattern": {".*_proj": 4}, "r": 16, "use_rslora": true, "lora_alpha": 3}),
    ] {
        let folder = edited(&changes);
        let adapter = format!("lora.adapter={}", folder.path().display());
        let (config, adapted) = of_peft(&[&adapter]).unwrap_or_else(|error| panic!("{changes}: {error}"));
        let lora = config.lora.unwrap();
        assert_eq!(lora.to_config().scale_of("layers.1.self_attn.q_proj"), 1.5, "{changes}");
        assert_eq!(lora.dropout, 0.0);
        assert!(relative(&logits(&adapted, &ids), &want) < 1e-5, "{changes}");
        let again = folder.path().join("again");
        adapted.save_peft(None, &again).unwrap();
        let (_, adapted) = of_peft(&[&format!("lora.adapter={}", again.display())]).unwrap();
        assert!(relative(&logits(&adapted, &ids), &want) < 1e-5, "{changes}");
    }
    let (config, _) = of_peft(&[]).unwrap();
    let lora = config.lora.unwrap();
    assert_eq!(
        (lora.rank, lora.alpha, &lora.target_modules[..]),
        (4, 6.0, &["down_proj", "v_proj", "q_proj"].map(String::from)[..])
    );
}

/// As in PEFT, the base is the folder named in the adapter's file, if it exists here.
#[test]
fn commands_take_the_folder_of_an_adapter() {
    let ((input, want), base) = (reference(), base());
    let unknown = edited(&json!({}));
    refuses(float8(&["generate", unknown.path().to_str().unwrap()]), "base_model_name_or_path = ");
    let named = edited(&json!({"base_model_name_or_path": base}));
    let hf_path = format!("model.hf_path={}", base.display());
    for (folder, more) in [(&named, &[][..]), (&unknown, &["--set", &hf_path])] {
        let adapter = folder.path().to_str().unwrap();
        let merged = folder.path().join("merged");
        exported(adapter, &merged, &[&["--merge-adapters"], more].concat()).unwrap();
        // In the dtype of the base, f32.
        let model = Decoder::<Flex>::load_hf(&merged, &Default::default()).unwrap();
        assert!(relative(&values(model.forward(ids(&input, [2, 24]))), &want) < 1e-5);
        let fixed = ["--prompt", "fn", "--max-new-tokens", "8", "--temperature", "0", "--set", "data.tokenizer=bytes"];
        let generate =
            |folder: &str, more: &[&str]| float8(&[&["generate", folder], &fixed[..], more].concat()).unwrap();
        assert_eq!(generate(adapter, more), generate(merged.to_str().unwrap(), &[]));
    }
}

#[test]
fn parameters_are_frozen_by_name() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let at = |number: usize| folder.path().join(number.to_string());
    let names = |number: usize, settings: &[&str]| {
        let saved = saved(at(number));
        let fixed = ["training.steps=2", "generate.max_new_tokens=0", &saved];
        run(&run_config(data.path(), &[&fixed, settings].concat())).unwrap();
        let files = TensorFiles::open_file(at(number).join("step-000000002/model.safetensors")).unwrap();
        files.names().map(String::from).collect::<Vec<_>>()
    };
    let all = names(0, &[]);
    assert_eq!(all.len(), 21);
    let left = names(1, &["training.freeze=[\"embed_tokens\", \"layers.0\", \"*layernorm.gamma\"]"]);
    let is_left = |name: &&String| {
        !name.starts_with("embed_tokens") && !name.starts_with("layers.0") && !name.contains("layernorm")
    };
    assert_eq!(left, all.iter().filter(is_left).cloned().collect::<Vec<_>>());
    assert_eq!(names(2, &["training.freeze=[\"*\", \"!norm.gamma\", \"!lm_head\"]"]), ["lm_head.weight", "norm.gamma"]);
    // Without adapters there is nothing to merge.
    refuses(exported(at(0), at(9), &["--merge-adapters"]), "the run has no adapters");
}
