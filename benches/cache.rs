//! Effect of the cache's dtype on the loss. The debug preset is trained on the Rust sources of this
//! repository and predicts each token of a validation text from the cache.
use std::path::{Path, PathBuf};

use benches::table::Table;
use burn::backend::Flex;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::Float8;
use clap::Parser;
use device_select::SelectedDevice;
use models::{Decoder, Decoders};
use serde_json::json;
use trainer::cli::Command;
use trainer::{CacheDtype, CacheOptions, CausalLm, CausalLmExt};

type Train = Float8<burn::backend::Autodiff<Flex>>;
type Eval = Float8<Flex>;

const STEPS: usize = 300;
/// Texts read at the same time, and bytes of each.
const TEXTS: usize = 16;
const LEN: usize = 128;

fn run(arguments: &[&str]) {
    let arguments = ["float8"].iter().chain(arguments);
    let command = Command::try_parse_from(arguments).expect("arguments");
    let job = command.job::<Decoders>(&mut std::io::sink()).expect("a configuration").expect("a run");
    job.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut std::io::stdout()).expect("it runs");
}

/// Sources of this repository for training, and one validation file.
fn sources() -> ([PathBuf; 3], PathBuf) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    (
        ["kernels/src", "crates/trainer/src", "tests"].map(|folder| root.join(folder)),
        root.join("crates/burn-float8/src/ops/linear.rs"),
    )
}

fn loss(model: &Decoder<Eval>, text: &[u8], dtype: Option<CacheDtype>) -> f64 {
    let device = Default::default();
    let mut cache = model.new_cache(&CacheOptions { dtype, positions: LEN, rows_alone: false });
    let ids = |at: usize| -> Tensor<Eval, 2, Int> {
        let ids: Vec<i32> = (0..TEXTS).map(|row| i32::from(text[row * LEN + at])).collect();
        Tensor::from_data(TensorData::new(ids, [TEXTS, 1]), &device)
    };
    let losses = (0..LEN - 1).map(|at| {
        let likelihoods = log_softmax(model.forward_cached(ids(at), &mut cache), 1).gather(1, ids(at + 1));
        f64::from(likelihoods.mean().neg().into_scalar())
    });
    losses.sum::<f64>() / (LEN - 1) as f64
}

/// Table by the dtype of the cache.
pub fn table() -> Table {
    let folder = std::env::temp_dir().join(format!("float8-bench-{}", std::process::id()));
    let [checkpoints, model] = ["run", "model"].map(|name| folder.join(name).display().to_string());
    let (data, held_out) = sources();
    let steps = STEPS.to_string();
    let mut arguments =
        vec!["train", "--device", "cpu", "--precision", "f32", "--steps", &steps, "--output-dir", &checkpoints];
    let data = data.map(|path| path.display().to_string());
    arguments.extend(data.iter().flat_map(|path| ["--data", path]));
    arguments.extend(["--set", "generate.max_new_tokens=0"]);
    run(&arguments);
    run(&["export", &checkpoints, "--output", &model, "--format", "f32", "--device", "cpu"]);
    let text = std::fs::read(held_out).expect("a file of this repository");
    let model = Decoder::<Eval>::load_hf(&model, &Default::default()).expect("exported above");
    let dim = model.config().dims.head_dim as f64;
    let caches =
        [("f32", 4.0, None), ("bf16", 2.0, Some(CacheDtype::Bf16)), ("e4m3", 1.0 + 4.0 / dim, Some(CacheDtype::E4m3))];
    let tokens = TEXTS * (LEN - 1);
    let title = format!("the loss of {tokens} tokens, of the debug preset after {STEPS} steps in f32, by its cache");
    let mut table = Table::new(title);
    for (cache, bytes, dtype) in caches {
        table.rows.push(json!({ "cache": cache, "bytes": bytes, "loss": loss(&model, &text, dtype) }));
    }
    std::fs::remove_dir_all(folder).expect("made above");
    table
}
