//! Memory: the estimate of a training step against measurements, and the memory of FP8-only
//! weights.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Float8, Float8Config, Float8Stack, Recipe, report};
use clap::Parser;
use device_select::SelectedDevice;
use models::{Decoder, DecoderConfig, Decoders, RunConfig};
use tempfile::TempDir;
use test_data::Counting;
use trainer::cli::Command;
use trainer::hf::{ExportDtype, ExportOptions, Float8Export};
use trainer::job::{Weights, prepare};
use trainer::{CausalLmExt, Job, ProgressLine};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Train = Float8<Autodiff<Flex>>;

/// Four layers of width 2,048.
const WIDE: &[&str] = &[
    "model.overrides.vocab_size=32000",
    "model.overrides.hidden_size=2048",
    "model.overrides.intermediate_size=5632",
    "model.overrides.num_hidden_layers=4",
    "model.overrides.num_attention_heads=16",
    "model.overrides.num_key_value_heads=4",
    "model.overrides.head_dim=128",
    "training.batch_size=1",
];

type Settings<'a> = &'a [&'a str];

/// The preset's shape.
const DEBUG: Settings = &["training.batch_size=8", "training.seq_len=128"];

const BF16: [&str; 2] = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];

/// Settings that use memory for different purposes.
const SETTINGS: &[&[&str]] = &[
    &["lora.rank=8"],
    &["training.precision=f32"],
    &["float8.recipe=tensorwise"],
    &[
        BF16[0],
        BF16[1],
        "training.activation_checkpointing=2",
        "optimizer.in_backward=true",
        "training.grad_clip_norm=inf",
    ],
];

/// Settings only for the smaller model: one trained layer, longer sequences, experts, and master
/// weights.
const SMALL: &[&[&str]] = &[
    &["training.freeze=['*', '!layers.1']"],
    &["training.seq_len=512", "training.activation_checkpointing=full", "float8.recipe=rowwise"],
    &["model.overrides.num_experts=4", "model.overrides.num_experts_per_tok=2"],
    &["training.param_dtype=bf16", "optimizer.master_weights=true"],
    &["training.compute_dtype=bf16", "training.seq_len=512"],
];

/// Two layers of width 512 with large tables, so that tables, their gradients and copies dominate.
const TABLES: &[&str] = &[
    "model.overrides.vocab_size=32000",
    "model.overrides.hidden_size=512",
    "model.overrides.num_hidden_layers=2",
    "training.batch_size=1",
    "training.seq_len=128",
];

const OF_TABLES: &[&[&str]] = &[
    &BF16,
    &["model.overrides.tie_word_embeddings=true", BF16[0], BF16[1]],
    &["training.loss_chunk=32"],
    &["model.overrides.tie_word_embeddings=true", "training.loss_chunk=32", "training.compute_dtype=bf16"],
];

fn job(folder: &TempDir, settings: &[&str]) -> Job<Decoders> {
    let data = folder.path().join("data.txt");
    fs::write(&data, "All that is gold does not glitter. ".repeat(4000)).unwrap();
    let data = data.display().to_string();
    let mut arguments = vec!["float8", "train", "--device", "cpu", "--steps", "2", "--data", &data];
    for setting in ["generate.max_new_tokens=0", "training.eval_batches=1", "training.seq_len=64"] {
        arguments.extend(["--set", setting]);
    }
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    let command = Command::try_parse_from(arguments).unwrap();
    command.job::<Decoders>(&mut std::io::sink()).unwrap().expect("a run")
}

/// Runs tests one at a time: allocations are counted for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn estimates_are_within_a_fifth() {
    let _alone = ALONE.lock();
    let (device, mut wrong) = (Default::default(), vec![]);
    let models: [(_, _, &[Settings]); 3] = [
        ("debug", DEBUG, &[SETTINGS, SMALL].concat()),
        ("2,048 wide", WIDE, SETTINGS),
        ("large tables", TABLES, OF_TABLES),
    ];
    let at_first = Counting::alive();
    for (name, model, of_model) in models {
        for &settings in of_model {
            let folder = TempDir::new().unwrap();
            let job = job(&folder, &[model, settings].concat());
            let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cpu, &device).unwrap();
            // Threads keep the buffers into which kernels pack operands. A run reuses the buffers
            // of the previous run, so they are added.
            let kept = Counting::alive() - at_first;
            let measured = kept
                + Counting::peak_of(|| {
                    job.run::<Train>(&SelectedDevice::Cpu, &device, &mut std::io::sink()).unwrap();
                });
            let ratio = estimate.peak() as f64 / measured as f64;
            if !(1.0 / 1.2..=1.2).contains(&ratio) {
                let measured = measured as f64 / f64::from(1 << 30);
                wrong.push(format!("{name}, {settings:?}: {ratio:.3} of {measured:.3} GiB\n{estimate}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// Three weights of 9 million elements and small ones.
fn wide() -> DecoderConfig {
    let mut config = trainer::ModelSection::preset_config(&models::ModelSection::default()).unwrap();
    let dims = &mut config.dims;
    (dims.hidden_size, dims.intermediate_size, dims.num_layers) = (1024, 8704, 1);
    (dims.num_heads, dims.num_kv_heads, dims.head_dim) = (8, 2, 64);
    config
}

/// Loads a folder's model with FP8-only weights.
fn load<B: AutodiffBackend + Float8Stack>(folder: &Path, recipe: Recipe, device: &B::Device) -> Decoder<B> {
    let settings = [format!("model.hf_path={}", folder.display()), format!("float8.recipe={recipe}")];
    let settings = [&settings[..], &["training.precision=fp8".into()]].concat();
    let config = RunConfig { fp8_only: true, ..RunConfig::load(None, &settings).unwrap() };
    let weights = Weights::open(&config, None, config.dimensions().unwrap()).unwrap();
    let loaded =
        prepare::<Decoders, B>(&config, weights, device, &ProgressLine::hidden(), &mut std::io::sink()).unwrap();
    assert_eq!(report(&loaded).layers.iter().filter(|layer| layer.fp8_only.is_some()).count(), 7);
    loaded
}

/// Bytes after loading it on a CPU, and peak bytes.
fn loaded(folder: &Path, recipe: Recipe) -> [usize; 2] {
    let (before, mut model) = (Counting::alive(), None);
    let peak = Counting::peak_of(|| model = Some(load::<Train>(folder, recipe, &Default::default())));
    let after = Counting::alive();
    drop(model);
    [after - before, peak]
}

/// FP8-only base with a larger output layer in high precision: the estimated parameters match the
/// loaded ones.
#[test]
fn parameters_of_adapters_on_codes_are_counted() {
    let _alone = ALONE.lock();
    let (folder, mut config) = (TempDir::new().unwrap(), wide());
    config.dims.vocab_size = 16_384;
    let base = folder.path().join("base");
    let model = Decoder::<Flex>::new(config, &Default::default()).unwrap().init_weights(1);
    model.save_hf(&base, &ExportOptions { dtype: ExportDtype::Bf16, ..ExportOptions::default() }).unwrap();
    drop(model);
    for recipe in [Recipe::Rowwise, Recipe::Mxfp8] {
        let settings = [format!("model.hf_path={}", base.display()), format!("float8.recipe={recipe}")];
        let fixed = ["lora.rank=8", "lora.base=fp8", "data.tokenizer=bytes", &settings[0], &settings[1]];
        let estimate = job(&folder, &fixed).memory_estimate::<Train>(1, &SelectedDevice::Cpu, &Default::default());
        let estimate = estimate.unwrap();
        let bytes = |name: &str| estimate.parts.iter().find(|part| part.name == name).unwrap().bytes[0] as f64;
        // Moments of adapters have twice the adapters' size.
        let counted = bytes("parameters") - bytes("AdamW's moments") / 2.0;
        let [now, _] = loaded(&base, recipe);
        let ratio = counted / now as f64;
        assert!((0.97..=1.03).contains(&ratio), "{recipe}: {ratio:.3} of {now} bytes\n{estimate}");
    }
}

/// A bf16 folder is cast while reading; an FP8 folder is read unchanged. Covers each recipe with
/// separate weight scales. The memory is at most 1.1 bytes per parameter of a linear, and two
/// tensors more during loading.
#[test]
fn codes_alone_take_a_byte_for_each_parameter() {
    let _alone = ALONE.lock();
    let (dir, config) = (TempDir::new().unwrap(), wide());
    let model = Decoder::<Flex>::new(config, &Default::default()).unwrap().init_weights(1);
    let options = ExportOptions { dtype: ExportDtype::Bf16, ..ExportOptions::default() };
    let bf16 = dir.path().join("bf16");
    model.save_hf(&bf16, &options).unwrap();
    let recipes = [Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8];
    let in_fp8 = recipes.map(|recipe| {
        let folder = dir.path().join(recipe.to_string());
        let float8 = Float8Config::new(recipe).with_filter_fqns(["lm_head"]);
        model.save_hf_float8(&folder, &options, &Float8Export::new(&float8)).unwrap();
        folder
    });
    drop(model);
    let dims = config.dims;
    let largest = 4 * dims.hidden_size * dims.intermediate_size;
    let tables = 2 * dims.vocab_size * dims.hidden_size;
    let linears = dims.num_params() - tables;
    // Tables, vectors and rotary tables are in f32.
    let others = 4 * tables + (1 << 19);
    for (recipe, in_fp8) in recipes.into_iter().zip(&in_fp8) {
        for folder in [&bf16, in_fp8] {
            let [now, peak] = loaded(folder, recipe);
            println!("{recipe} {}: {now} bytes, at most {peak}, for {linears} parameters", folder.display());
            assert!(now >= linears && now <= linears + linears / 10 + others, "{recipe}: {now} bytes for {linears}");
            assert!(peak <= linears + linears / 10 + others + 2 * largest, "{recipe}: {peak} bytes at most");
        }
    }
}

/// Uses CubeCL's count of allocated device memory.
#[cfg(feature = "wgpu")]
#[test]
fn codes_alone_take_a_byte_for_each_parameter_on_wgpu() {
    type Train = Float8<Autodiff<burn::backend::Wgpu>>;
    if device_select::wgpu_adapters().unwrap().is_empty() {
        return println!("codes_alone_take_a_byte_for_each_parameter_on_wgpu: skipped, this machine has no adapter");
    }
    let _alone = ALONE.lock();
    let (folder, config, device) = (TempDir::new().unwrap(), wide(), Default::default());
    let bf16 = folder.path().join("bf16");
    let model = Decoder::<Flex>::new(config, &Default::default()).unwrap().init_weights(1);
    model.save_hf(&bf16, &ExportOptions { dtype: ExportDtype::Bf16, ..ExportOptions::default() }).unwrap();
    let tables = 2 * config.dims.vocab_size * config.dims.hidden_size;
    let linears = (config.dims.num_params() - tables) as u64;
    let others = (4 * tables + (1 << 19)) as u64;
    let in_use = || Train::device_memory(&device).unwrap().in_use;
    // Memory of a dropped model is freed when the next one is loaded.
    let before = in_use();
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8] {
        let model = load::<Train>(&bf16, recipe, &device);
        let now = in_use() - before;
        drop(model);
        println!("{recipe}: {now} bytes for {linears} parameters");
        assert!(now >= linears && now <= linears + linears / 10 + others, "{recipe}: {now} bytes for {linears}");
    }
}
