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
// Links its compiled trainers for the CPU and wgpu, which this file would compile again.
use float8_cli as _;
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

type Settings<'a> = &'a [&'a str];

const BF16: [&str; 2] = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];
const TIED: &str = "model.overrides.tie_word_embeddings=true";
const FULL: &str = "training.activation_checkpointing=full";

/// The preset's shape; four layers of width 1,024; and two layers of width 512 with large tables, so
/// that tables, their gradients and copies dominate.
const MODELS: [Settings<'_>; 3] = [
    &["training.batch_size=8", "training.seq_len=128"],
    &[
        "training.batch_size=1",
        "model.overrides={ vocab_size = 16000, hidden_size = 1024, intermediate_size = 2816, num_hidden_layers = 4, \
         num_attention_heads = 8, num_key_value_heads = 2, head_dim = 128 }",
    ],
    &[
        "training.batch_size=1",
        "training.seq_len=128",
        "model.overrides={ vocab_size = 32000, hidden_size = 512, num_hidden_layers = 2 }",
    ],
];

/// Models, and settings that use memory for different purposes: adapters, precisions, gradients in
/// backward, one trained layer, longer sequences, experts, master weights, tables and chunks.
const RUNS: &[(&[usize], Settings<'_>)] = &[
    (&[0, 1], &["lora.rank=8"]),
    (&[0, 1], &["training.precision=f32"]),
    (&[0, 1], &["float8.recipe=tensorwise"]),
    (
        &[0, 1],
        &[
            BF16[0],
            BF16[1],
            "training.activation_checkpointing=2",
            "optimizer.in_backward=true",
            "training.grad_clip_norm=inf",
        ],
    ),
    (&[0], &["training.freeze=['*', '!layers.1']"]),
    (&[0], &["training.seq_len=512", FULL, "float8.recipe=rowwise"]),
    (&[0], &["model.overrides.num_experts=4", "model.overrides.num_experts_per_tok=2"]),
    (&[0], &[BF16[0], "optimizer.master_weights=true"]),
    (&[0], &["training.compute_dtype=bf16", "training.seq_len=512"]),
    (&[2], &BF16),
    (&[2], &[TIED, BF16[0], BF16[1]]),
    (&[2], &["training.loss_chunk=32"]),
    (&[2], &[TIED, "training.loss_chunk=32", "training.compute_dtype=bf16"]),
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
    let at_first = Counting::alive();
    for (models, settings) in RUNS {
        for model in *models {
            let folder = TempDir::new().unwrap();
            let job = job(&folder, &[MODELS[*model], settings].concat());
            let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cpu, &device).unwrap();
            // Threads keep the buffers into which kernels pack operands. A run reuses the buffers
            // of the previous run, so they are added.
            let kept = Counting::alive() - at_first;
            let run = || job.run::<Train>(&SelectedDevice::Cpu, &device, &mut std::io::sink()).unwrap();
            let measured = kept + Counting::peak_of(run);
            let ratio = estimate.peak() as f64 / measured as f64;
            if !(1.0 / 1.2..=1.2).contains(&ratio) {
                let measured = measured as f64 / f64::from(1 << 30);
                wrong.push(format!("model {model}, {settings:?}: {ratio:.3} of {measured:.3} GiB\n{estimate}"));
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

fn options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

/// Writes a model in bf16.
fn written(config: DecoderConfig, to: &Path) -> Decoder<Flex> {
    let model = Decoder::<Flex>::new(config, &Default::default()).unwrap().init_weights(1);
    model.save_hf(to, &options(ExportDtype::Bf16)).unwrap();
    model
}

/// Bytes beside tensors, such as names and headers.
const SMALL: usize = 1 << 18;

/// Bytes of [`wide`]'s largest weight in f32, of what is not in FP8 (tables, vectors and rotary
/// tables, in f32), and the parameters of its linears.
fn sizes() -> [usize; 3] {
    let dims = wide().dims;
    let tables = 2 * dims.vocab_size * dims.hidden_size;
    [4 * dims.hidden_size * dims.intermediate_size, 4 * tables + (1 << 19), dims.num_params() - tables]
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
    drop(written(config, &base));
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
/// tensors more during loading. Weights are made one by one, so an export takes two tensors, and an
/// import two more than the model.
#[test]
fn fp8_only_weights_take_a_byte_a_parameter() {
    let _alone = ALONE.lock();
    let dir = TempDir::new().unwrap();
    let [bf16, f32] = ["bf16", "f32"].map(|name| dir.path().join(name));
    let model = written(wide(), &bf16);
    let [largest, others, linears] = sizes();
    let peak = Counting::peak_of(|| model.save_hf(&f32, &options(ExportDtype::F32)).unwrap());
    assert!((largest..=2 * largest + SMALL).contains(&peak), "{peak} bytes for tensors of {largest}");
    let recipes = [Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8];
    let in_fp8 = recipes.map(|recipe| {
        let folder = dir.path().join(recipe.to_string());
        let float8 = Float8Config::new(recipe).with_filter_fqns(["lm_head"]);
        let export =
            || model.save_hf_float8(&folder, &options(ExportDtype::Bf16), &Float8Export::new(&float8)).unwrap();
        let peak = Counting::peak_of(export);
        assert!((largest / 4..=2 * largest + SMALL).contains(&peak), "{recipe}: {peak} bytes for tensors of {largest}");
        folder
    });
    drop(model);
    for (recipe, in_fp8) in recipes.into_iter().zip(&in_fp8) {
        for folder in [&bf16, in_fp8] {
            let [now, peak] = loaded(folder, recipe);
            println!("{recipe} {}: {now} bytes, at most {peak}, for {linears} parameters", folder.display());
            assert!(now >= linears && now <= linears + linears / 10 + others, "{recipe}: {now} bytes for {linears}");
            assert!(peak <= linears + linears / 10 + others + 2 * largest, "{recipe}: {peak} bytes at most");
        }
    }
    let parameters = 4 * wide().dims.num_params();
    for folder in [&f32, &bf16].into_iter().chain(&in_fp8) {
        let peak = Counting::peak_of(|| drop(Decoder::<Flex>::load_hf(folder, &Default::default()).unwrap()));
        assert!((parameters..=parameters + 2 * largest + SMALL).contains(&peak), "{}: {peak}", folder.display());
    }
}

/// Uses CubeCL's count of allocated device memory.
#[cfg(feature = "wgpu")]
#[test]
fn fp8_only_weights_take_a_byte_a_parameter_on_wgpu() {
    type Train = Float8<Autodiff<burn::backend::Wgpu>>;
    if device_select::wgpu_adapters().unwrap().is_empty() {
        return test_data::skip(test_data::VULKAN);
    }
    let _alone = ALONE.lock();
    let (folder, device) = (TempDir::new().unwrap(), Default::default());
    let bf16 = folder.path().join("bf16");
    drop(written(wide(), &bf16));
    let [_, others, linears] = sizes().map(|bytes| bytes as u64);
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
