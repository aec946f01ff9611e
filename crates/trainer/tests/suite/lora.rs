//! Training of adapters: the base is unchanged, checkpoints contain only adapters, and PEFT reads
//! them.

use std::fs;
use std::path::Path;

use anyhow::Error;
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::without_float8;
use device_select::SelectedDevice;
use models::{Decoders, RunConfig};
use safetensors::SafeTensors;
use serde_json::json;
use tempfile::TempDir;
use trainer::checkpoint::{SavedRun, Which};
use trainer::job::{Start, Task};
use trainer::{CausalLmExt, ExportOptions, Job};

use crate::common::float8;
use crate::common::{Stored, Train, refuses, relative, run, run_config, text, values, write_safetensors};
use crate::float8_python::run_python;

const LORA: [&str; 2] = ["lora.rank=4", "lora.alpha=8"];

/// Run of adapters with these settings, saved in `folder`.
fn config(data: &Path, folder: &Path, settings: &[&str]) -> RunConfig {
    let folder = format!("checkpoint.output_dir={}", folder.display());
    run_config(data, &[&LORA[..], &["optimizer.lr=1e-2", "generate.max_new_tokens=0", &folder], settings].concat())
}

fn losses(config: &RunConfig) -> Vec<u64> {
    let (outcome, _) = run(config).unwrap();
    outcome.steps.iter().map(|line| line.loss.to_bits()).chain(outcome.held_out_loss.map(f64::to_bits)).collect()
}

fn job(config: &RunConfig, folder: &Path, task: Task) -> Result<String, Error> {
    let saved = SavedRun::open(folder, Which::Latest)?;
    let start = Start { saved: Some(saved), ..Start::default() };
    let mut out = vec![];
    let job = Job::<Decoders> { config: config.clone(), start, task };
    job.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

#[test]
fn adapters_learn_and_are_all_that_is_saved() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let config = config(data.path(), &folder.path().join("run"), &["lora.dropout=0.1"]);
    let (outcome, _) = run(&config).unwrap();
    let (first, last) = (outcome.steps.first().unwrap().loss, outcome.steps.last().unwrap().loss);
    assert!(last < first - 0.05, "{first} to {last}");
    let checkpoint = folder.path().join("run/step-000000012");
    for (file, names) in [("model.safetensors", 28), ("optimizer.safetensors", 56)] {
        let bytes = fs::read(checkpoint.join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.len(), names, "{file}");
        assert!(tensors.names().iter().all(|name| name.starts_with("lora.adapters.")), "{file}");
    }
    // Dropout is disabled in evaluation.
    let printed =
        job(&config, &folder.path().join("run"), Task::Evaluate { data: vec![], precisions: vec![] }).unwrap();
    let held_out = format!("validation loss: {:.5}", outcome.held_out_loss.unwrap());
    assert!(printed.contains(&held_out) && printed.contains("checkpoint: step 12\n"), "{printed}: {held_out}");
}

#[test]
fn segments_and_a_base_of_codes_are_the_same_bits() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    // Recipes in which both GEMMs share one copy of a weight.
    for recipe in ["tensorwise", "blockwise"] {
        let recipe = format!("float8.recipe={recipe}");
        let mut number = 0;
        let mut losses = |settings: &[&str]| {
            number += 1;
            let path = folder.path().join(format!("{}-{number}", &recipe[14..]));
            losses(&config(data.path(), &path, &[&["lora.dropout=0.1", &recipe], settings].concat()))
        };
        let plain = losses(&[]);
        assert_eq!(losses(&["training.activation_checkpointing=full", "training.loss_chunk=96"]), plain, "{recipe}");
        assert_eq!(losses(&["lora.base=fp8"]), plain, "{recipe}");
        assert_ne!(losses(&["training.seed=5"]), plain, "{recipe}");
    }
}

/// Base weights never change, and the first linears after a frozen embedding have no backward.
/// Still, each step is an FP8 step: histories have an amax of each completed step, evaluation uses
/// them, and an export writes static scales.
#[test]
fn each_step_is_one_of_fp8() {
    // With adapters only on the output layer, no linear of the base has a backward.
    for targets in ["all-linear", "lm_head"] {
        each_step_is_one_of_fp8_beside(targets);
    }
}

fn each_step_is_one_of_fp8_beside(targets: &str) {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let path = folder.path().join("run");
    let targets = format!("lora.target_modules={targets}");
    let settings = ["float8.recipe=delayed", "training.steps=4", "data.tokenizer=bytes", &targets, "lora.alpha=64"];
    let trained = config(data.path(), &path, &settings);
    run(&trained).unwrap();
    let rebuilt = [&settings[..], &["training.activation_checkpointing=full"]].concat();
    let rebuilt = config(data.path(), &folder.path().join("rebuilt"), &rebuilt);
    assert_eq!(losses(&rebuilt), losses(&config(data.path(), &folder.path().join("again"), &settings)));
    let state = fs::read_to_string(path.join("step-000000004/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    // The next step has begun.
    assert_eq!(state["float8"]["step"], 5);
    for linear in ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"] {
        let history = &state["float8"]["layers"][format!("base.{linear}")]["input"]["history"];
        assert_eq!(history.as_array().expect(linear).iter().filter(|amax| **amax != 0).count(), 4, "{history}");
    }
    let (path, merged) = (path.to_str().unwrap(), folder.path().join("merged"));
    float8(&["eval", path]).unwrap();
    let out =
        float8(&["export", path, "--output", merged.to_str().unwrap(), "--merge-adapters", "--format", "fp8"]).unwrap();
    assert!(out.contains("static inputs"), "{out}");
    // Weight histories belong to the base; merged weights have separate scales.
    let exact = folder.path().join("exact");
    float8(&["export", path, "--output", exact.to_str().unwrap(), "--merge-adapters", "--format", "f32"]).unwrap();
    let floats = |folder: &Path, name: &str| {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let tensor = SafeTensors::deserialize(&bytes).unwrap().tensor(&format!("model.layers.1.mlp.{name}")).unwrap();
        let bytes = tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        bytes.fold(0.0, |max: f32, value| max.max(value.abs()))
    };
    let (scale, largest) = (floats(&merged, "down_proj.weight_scale"), floats(&exact, "down_proj.weight"));
    assert!((448.0 * scale / largest - 1.0).abs() < 1e-6, "{scale} of {largest}");
}

/// With codes and unchanged scales, small updates are lost by rounding; in f32 nothing is lost.
#[test]
fn merging_says_what_rounding_leaves() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let at = |name: &str| folder.path().join(name);
    let left = |from: &str, flags: &[&str]| {
        let (from, to) = (at(from), at(&format!("{from} by {}", flags.join(" "))));
        let arguments = [&["export", from.to_str().unwrap(), "--output", to.to_str().unwrap()], flags].concat();
        let out = float8(&arguments).unwrap();
        let share = out.split_once("rounding leaves ").map(|(_, rest)| rest.split_once(' ').unwrap().0.parse::<f64>());
        (to, out.contains("--recipe of other scales"), share.map(Result::unwrap))
    };
    let settings = ["training.steps=2", "data.tokenizer=bytes", "float8.recipe=rowwise"];
    let whole = format!("checkpoint.output_dir={}", at("whole").display());
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

/// Validation loss printed by a command.
fn printed_loss(printed: &str) -> f64 {
    let (_, rest) = printed.split_once("validation loss: ").expect(printed);
    rest.split_whitespace().next().unwrap().parse().unwrap()
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
    assert_eq!((row("tensorwise").len(), row("tensorwise")[1]), (4, row("delayed")[1]));
    assert!(row("delayed").join(" ").ends_with("% no histories: scaled as tensorwise"), "{table}");
}

#[test]
fn an_exported_adapter_and_merged_weights_give_the_same_loss() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let path = folder.path().join("run");
    let config = config(data.path(), &path, &["training.precision=f32"]);
    run(&config).unwrap();
    let evaluate = || Task::Evaluate { data: vec![], precisions: vec![] };
    let want = printed_loss(&job(&config, &path, evaluate()).unwrap());
    let export = |to: &str, merge| {
        let to = folder.path().join(to);
        job(&config, &path, Task::Export { to: to.clone(), merge, float8: false, options: ExportOptions::default() })
            .unwrap();
        to
    };
    let (adapter, merged) = (export("adapter", false), export("merged", true));
    let files = |folder: &Path| {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(files(&adapter), ["adapter_config.json", "adapter_model.safetensors"]);
    // A run of zero steps from it.
    let of_adapter = format!("lora.adapter={}", adapter.display());
    let again =
        run_config(data.path(), &[&LORA[..], &["training.precision=f32", "training.steps=0", &of_adapter]].concat());
    assert_eq!(format!("{:.5}", run(&again).unwrap().0.held_out_loss.unwrap()), format!("{want:.5}"));
    let mut of_merged =
        run_config(data.path(), &["training.precision=f32", "training.steps=0", "data.tokenizer=bytes"]);
    of_merged.model = trainer::ModelSection::of_folder(merged.clone(), serde_json::Map::new());
    assert!((run(&of_merged).unwrap().0.held_out_loss.unwrap() - want).abs() < 2e-5);

    // A run of adapters on it resumes only with the same files.
    let path = folder.path().join("second");
    let settings = ["training.precision=f32", "training.steps=1", "data.tokenizer=bytes"];
    let mut config = self::config(data.path(), &path, &settings);
    config.model = of_merged.model;
    run(&config).unwrap();
    assert!(!job(&config, &path, evaluate()).unwrap().contains("warning"));
    let weights = merged.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let difference = format!("{}: it has other contents since this run began", weights.display());
    refuses(job(&config, &path, evaluate()), &difference);
    // Flags for weights are refused for adapters only.
    for flags in [&["--format", "f32"][..], &["--max-shard-size", "1MB"]] {
        let to = folder.path().join("refused");
        let arguments = [&["export", path.to_str().unwrap(), "--output", to.to_str().unwrap()], flags].concat();
        refuses(float8(&arguments), &format!("{} = ", flags[0]));
        assert!(!to.exists());
    }
    // A missing base folder gives a specific error.
    fs::rename(&merged, folder.path().join("elsewhere")).unwrap();
    let gone = format!("there is no folder {}, which has the weights", merged.display());
    refuses(float8(&["eval", path.to_str().unwrap()]), &gone);
    fs::rename(folder.path().join("elsewhere"), &merged).unwrap();
}

/// PEFT's adapter in [`vectors`] on the checkpoint in `tests/goldens/hf_llama`.
fn of_peft(settings: &[&str]) -> Result<(RunConfig, trainer::Adapted<Train, models::Decoder<Train>>), Error> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let base = format!("model.hf_path={}", own.join("../../tests/goldens/hf_llama").display());
    let adapter = format!("lora.adapter={}", own.join("tests/vectors/peft").display());
    let given = ["training.precision=f32", &base, &adapter];
    let settings: Vec<_> = given.iter().chain(settings).map(|s| s.to_string()).collect();
    let config = RunConfig::load(None, &settings)?;
    let weights = trainer::job::Weights::open(&config, None, config.dimensions()?)?;
    let progress = trainer::ProgressLine::hidden();
    let out = &mut std::io::sink();
    let model = trainer::job::prepare::<Decoders, Train>(&config, weights, &Default::default(), &progress, out)?;
    let lora = config.lora.as_ref().expect("it is given");
    let adapted = trainer::job::adapt::<Train, _>(lora, without_float8(model), config.training.seed, None)?;
    Ok((config, adapted))
}

fn vectors() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/peft")
}

fn reference() -> (Vec<i32>, Vec<f32>) {
    let bytes = fs::read(vectors().join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("input_ids").unwrap();
    let ids = ids.data().as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    let logits = tensors.tensor("logits").unwrap();
    (ids, logits.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn logits(adapted: &trainer::Adapted<Train, models::Decoder<Train>>, ids: &[i32]) -> Vec<f32> {
    let ids = Tensor::<Train, 2, Int>::from_data(TensorData::new(ids.to_vec(), [2, 24]), &Default::default());
    values(adapted.attached().forward(ids).inner())
}

#[test]
fn peft_gives_the_same_logits() {
    let (ids, want) = reference();
    let (_, adapted) = of_peft(&[]).unwrap();
    let got = logits(&adapted, &ids);
    assert!(relative(&got, &want) < 1e-5, "{}", relative(&got, &want));
    let merged = {
        let ids = Tensor::<Train, 2, Int>::from_data(TensorData::new(ids.clone(), [2, 24]), &Default::default());
        values(adapted.merged().forward(ids).inner())
    };
    assert!(relative(&merged, &got) < 1e-6, "{}", relative(&merged, &got));
    // Writing it again gives the same tensors as PEFT's.
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("adapter");
    adapted.save_peft(None, &to).unwrap();
    let tensors = |path: &Path| {
        let bytes = fs::read(path.join("adapter_model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<_> = tensors
            .iter()
            .map(|(name, view)| (name.to_string(), view.shape().to_vec(), view.data().to_vec()))
            .collect();
        tensors.sort();
        tensors
    };
    assert!(tensors(&to) == tensors(&vectors()));
}

/// Multiplies each element by a half, exactly.
struct Halve;

impl ModuleMapper<Train> for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Train, D>>) -> Param<Tensor<Train, D>> {
        param.map(|tensor| tensor.mul_scalar(0.5))
    }
}

/// Tests an adapter with new values in PEFT. If Python has it, `peft_vectors.py` checks every
/// tensor and our logits.
#[test]
fn peft_loads_ours() {
    let (ids, want) = reference();
    let (_, mut adapted) = of_peft(&[]).unwrap();
    adapted.lora = Module::<Train>::map(adapted.lora, &mut Halve);
    let got = logits(&adapted, &ids);
    assert!(relative(&got, &want) > 1e-2, "another adapter than PEFT's own");
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("adapter");
    adapted.save_peft(None, &folder).unwrap();
    let ids = Stored {
        name: "input_ids".into(),
        dtype: safetensors::Dtype::I32,
        shape: vec![2, 24],
        bytes: ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    };
    let logits = Stored::f32("logits", &[2, 24, want.len() / 48], &got);
    write_safetensors(&folder.join("reference.safetensors"), &[ids, logits]);
    run_python("peft_vectors.py", "peft, transformers", &[folder.as_os_str()]);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    for (setting, text) in [
        ("lora.alpha=8", "its rank is 4 and its alpha 6"),
        ("lora.target_modules=['q_proj']", "down_proj.lora_A.weight belongs to no adapter"),
        ("lora.target_modules=['q_proj', 'v_proj', 'down_proj', 'k_proj']", "k_proj.lora_A.weight"),
        ("lora.target_modules=['qq_proj']", "\"qq_proj\" matches none"),
    ] {
        refuses(of_peft(&[setting]), text);
    }
    let data = text();
    // An impossible rank is refused before anything is allocated.
    let huge = [1_u64 << 40, 1 << 56, 1 << 62].map(|rank| format!("lora.rank={rank}"));
    let pattern = format!("lora.rank_pattern={{q_proj={}}}", 1_u64 << 62);
    for (settings, text) in [
        (&["lora.rank=0"][..], "lora.rank = 0"),
        (&["lora.rank_pattern={q_proj=0}"], "lora.rank_pattern = {q_proj = 0}"),
        (&["lora.alpha_pattern={q_proj=nan}"], "lora.alpha_pattern = {q_proj = NaN}"),
        (&["lora.rank_pattern={qproj=3}"], "lora.rank_pattern: \"qproj\" matches none"),
        // A linear of the model without an adapter.
        (
            &["lora.target_modules=q_proj", "lora.alpha_pattern={v_proj=3}"],
            "lora.alpha_pattern: \"v_proj\" matches none",
        ),
        (&["lora.dropout=1.5"], "lora.dropout = 1.5"),
        (&["lora.base=fp8", "training.precision=f32"], "needs training.precision = \"fp8\""),
        (&[&huge[0]], "lora.rank = "),
        (&[&huge[1]], "lora.rank = "),
        (&[&huge[2]], "lora.rank = "),
        (&[&pattern], "lora.rank_pattern = "),
        // The beginning of a module's name does not match it.
        (&["training.freeze=['layers.0.mlp.up']"], "has no parameter of this name"),
        (&["training.freeze=['[']"], "no valid glob"),
        (&["training.freeze=['*']"], "nothing is left to train"),
        (&["training.freeze=['*']", "lora.rank=2"], "the whole model stays as it is"),
    ] {
        refuses(run(&run_config(data.path(), settings)), text);
    }
    // Over several ranks it is refused, in the estimate too.
    let config = run_config(data.path(), &["lora.base=fp8"]);
    let memory = Job::<Decoders> { config, start: Start::default(), task: Task::Memory { ranks: 2, available: None } };
    let told = memory.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut std::io::sink());
    refuses(told, "over several ranks frozen weights have their values");
}

#[test]
fn adapter_files_that_do_not_fit_are_refused() {
    let of = |changes: &serde_json::Value| {
        let folder = edited(changes);
        of_peft(&[&format!("lora.adapter={}", folder.path().display())])
    };
    for (name, value) in [
        ("peft_type", "ADALORA".into()),
        ("bias", "all".into()),
        ("use_dora", true.into()),
        ("modules_to_save", serde_json::json!(["lm_head"])),
        ("init_lora_weights", "pissa_niter_4".into()),
        ("arrow_config", json!({"top_k": 2})),
        ("foo_variant", json!({"x": 1})),
        ("use_rslora", "yes".into()),
        ("rank_pattern", json!({"q_proj": 2, ".*_proj": 4})),
        ("target_modules", json!(["q_proj", "v_proj", "down_proj", "up_proj"])),
        ("target_modules", r".*\.qq_proj".into()),
        ("target_modules", json!([])),
        ("r", 0.into()),
        ("lora_alpha", 0.into()),
        // α · √r would be infinite.
        ("lora_alpha", 1e308.into()),
        ("lora_dropout", 1.5.into()),
    ] {
        refuses(of(&json!({name: &value})), &format!("adapter_config.json: {name} = {value}"));
    }
    let endless = r"(.*)*(.+)+\2x";
    for pattern in [".*(", endless] {
        refuses(of(&json!({"target_modules": pattern})), "adapter_config.json: target_modules: the pattern ");
    }
    for (key, name, value) in [
        ("rank_pattern", "v_proj", 0),
        ("rank_pattern", endless, 4),
        ("alpha_pattern", "v_proj", 0),
        ("alpha_pattern", endless, 6),
    ] {
        let told = match value {
            0 => format!("adapter_config.json: {key}.{name} = 0 is not supported"),
            _ => format!("adapter_config.json: {key}.{name}: the pattern "),
        };
        refuses(of(&json!({key: {name: value}})), &told);
    }
    // Tensors that match no target, and tensors with another rank than configured.
    let targets = json!({"target_modules": ".*self_attn.(q|v)_proj"});
    refuses(of(&targets), "down_proj.lora_A.weight belongs to no adapter");
    refuses(of(&json!({"rank_pattern": {"v_proj": 2}})), "v_proj.lora_A.weight");
}

/// PEFT's adapter with changes in its configuration.
fn edited(changes: &serde_json::Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(vectors().join(file), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("adapter_config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    fs::write(&path, json.to_string()).unwrap();
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
    let (ids, want) = reference();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/hf_llama");
    let unknown = edited(&json!({}));
    refuses(float8(&["generate", unknown.path().to_str().unwrap()]), "base_model_name_or_path = ");
    let named = edited(&json!({"base_model_name_or_path": base}));
    let hf_path = format!("model.hf_path={}", base.display());
    for (folder, more) in [(&named, &[][..]), (&unknown, &["--set", &hf_path])] {
        let adapter = folder.path().to_str().unwrap();
        let merged = folder.path().join("merged");
        float8(&[&["export", adapter, "--output", merged.to_str().unwrap(), "--merge-adapters"], more].concat())
            .unwrap();
        // In the dtype of the base, f32.
        let model = models::Decoder::<Flex>::load_hf(&merged, &Default::default()).unwrap();
        let ids = Tensor::<Flex, 2, Int>::from_data(TensorData::new(ids.clone(), [2, 24]), &Default::default());
        assert!(relative(&values(model.forward(ids)), &want) < 1e-5);
        let text = ["--set", "data.tokenizer=bytes", "--set", "training.seq_len=24"];
        let data = self::text();
        float8(&[&["eval", adapter, "--data", data.path().to_str().unwrap()], &text[..], more].concat()).unwrap();
        let generate = |folder: &str, more: &[&str]| {
            let flags = ["--prompt", "fn", "--max-new-tokens", "8", "--temperature", "0"];
            float8(&[&["generate", folder], &flags[..], &text, more].concat()).unwrap()
        };
        assert_eq!(generate(adapter, more), generate(merged.to_str().unwrap(), &[]));
    }
}

#[test]
fn parameters_are_frozen_by_name() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let names = |number: usize, settings: &[&str]| {
        let path = folder.path().join(number.to_string());
        let saved = format!("checkpoint.output_dir={}", path.display());
        let fixed = ["training.steps=2", "generate.max_new_tokens=0", &saved];
        run(&run_config(data.path(), &[&fixed, settings].concat())).unwrap();
        let bytes = fs::read(path.join("step-000000002/model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut names: Vec<_> = tensors.names().into_iter().map(String::from).collect();
        names.sort();
        names
    };
    let all = names(0, &[]);
    assert_eq!(all.len(), 21);
    let left = names(1, &["training.freeze=[\"embed_tokens\", \"layers.0\", \"*layernorm.gamma\"]"]);
    let is_left = |name: &&String| {
        !name.starts_with("embed_tokens") && !name.starts_with("layers.0") && !name.contains("layernorm")
    };
    assert_eq!(left, all.iter().filter(is_left).cloned().collect::<Vec<_>>());
    assert_eq!(names(2, &["training.freeze=[\"*\", \"!norm.gamma\", \"!lm_head\"]"]), ["lm_head.weight", "norm.gamma"]);
}

/// Without adapters there is nothing to merge.
#[test]
fn a_merge_needs_adapters() {
    let (data, folder) = (text(), TempDir::new().unwrap());
    let path = folder.path().join("run");
    let saved = format!("checkpoint.output_dir={}", path.display());
    let config = run_config(data.path(), &["training.steps=1", "generate.max_new_tokens=0", &saved]);
    run(&config).unwrap();
    let task =
        Task::Export { to: folder.path().join("to"), merge: true, float8: false, options: ExportOptions::default() };
    refuses(job(&config, &path, task), "the run has no adapters");
}
