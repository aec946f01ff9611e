//! The estimate of a training step's memory, against what training takes.

use std::fs;

use burn::backend::{Autodiff, Flex};
use burn_float8::Float8;
use device_select::SelectedDevice;
use llama3::Llama3;
use tempfile::TempDir;
use test_data::Counting;
use train::Job;
use train::cli::parse_from;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Train = Float8<Autodiff<Flex>>;

/// Four layers 2,048 wide.
const WIDE: &[&str] = &[
    "model.vocab_size=32000",
    "model.hidden_size=2048",
    "model.intermediate_size=5632",
    "model.num_layers=4",
    "model.num_heads=16",
    "model.num_kv_heads=4",
    "model.head_dim=128",
    "training.batch_size=1",
];

const DEBUG: &[&str] = &["training.batch_size=8"];

const IN_BACKWARD: [&str; 3] =
    ["training.activation_checkpointing=2", "optimizer.in_backward=true", "training.max_norm=inf"];

/// Each takes memory for other things.
const SETTINGS: [&[&str]; 3] = [
    &["training.precision=f32"],
    &["float8.recipe=tensorwise"],
    &["float8.recipe=rowwise", "training.activation_checkpointing=full", "training.loss_chunk=128"],
];

/// Rounding takes minutes in the wider model.
const BF16: [&str; 2] = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];

fn job(folder: &TempDir, settings: &[&str]) -> Job<Llama3> {
    let data = folder.path().join("data.txt");
    fs::write(&data, "All that is gold does not glitter. ".repeat(4000)).unwrap();
    let data = data.display().to_string();
    let mut arguments = vec!["llama3", "train", "--device", "cpu", "--steps", "2", "--data", &data];
    for setting in ["generate.max_new_tokens=0", "training.eval_batches=1", "training.seq_len=64"] {
        arguments.extend(["--set", setting]);
    }
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    let arguments = arguments.into_iter().map(Into::into).collect();
    let command = parse_from::<Llama3>("llama3", arguments).unwrap();
    command.job::<Llama3>(&mut std::io::sink()).unwrap().expect("a run")
}

#[test]
fn estimates_are_within_a_tenth() {
    let (device, mut wrong) = (Default::default(), vec![]);
    let in_bf16 = [&IN_BACKWARD[..], &BF16].concat();
    for (name, model, last) in [("debug", DEBUG, &in_bf16[..]), ("2,048 wide", WIDE, &IN_BACKWARD)] {
        for settings in SETTINGS.into_iter().chain([last]) {
            let folder = TempDir::new().unwrap();
            let job = job(&folder, &[model, settings].concat());
            let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cpu, &device).unwrap().expect("known");
            let measured = Counting::peak_of(|| {
                job.run::<Train>(&SelectedDevice::Cpu, &device, &mut std::io::sink()).unwrap();
            });
            let ratio = estimate.peak() as f64 / measured as f64;
            if !(0.9..=1.1).contains(&ratio) {
                let measured = measured as f64 / f64::from(1 << 30);
                wrong.push(format!("{name}, {settings:?}: {ratio:.3} of {measured:.3} GiB\n{estimate}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
