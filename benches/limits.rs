//! Time of each operation of a training step on the CPU, against the machine's limits. Uses the
//! model of `torch_cpu.py` and the trainer's `[profile]`.
//!
//! ```text
//! least = max(arithmetic / peak, bytes / stream)        peak: Burn's f32 matmul of 1,024³        stream: two buffers, read by all cores
//! ```
//! Arithmetic counts matrix products; operations without one are bound by memory. Bytes count f32
//! tensors, or codes, each read and written once. Caches make some operations faster than that.
use std::time::Instant;

use burn::backend::Flex;
use burn::tensor::{Distribution, Tensor};
use device_select::SelectedDevice;
use serde_json::Value;

use crate::model::{Train, with_job};
use crate::table::{Cell, Table, number, optional};
use crate::{gemv, median};

const LAYERS: usize = 4;
const HIDDEN: usize = 256;
const FFN: usize = 704;
/// Width of all keys, and of all values.
const KEYS: usize = 128;
const VOCABULARY: usize = 257;
/// Tokens in a batch.
const TOKENS: usize = 2048;
/// Tokens in a sequence.
const LENGTH: usize = 256;
/// K and N of a layer's linears.
const LINEARS: [[usize; 2]; 7] =
    [[HIDDEN, HIDDEN], [HIDDEN, KEYS], [HIDDEN, KEYS], [HIDDEN, HIDDEN], [HIDDEN, FFN], [HIDDEN, FFN], [FFN, HIDDEN]];

const SETTINGS: [&str; 15] = [
    "model.overrides.hidden_size=256",
    "model.overrides.num_hidden_layers=4",
    "model.overrides.num_attention_heads=8",
    "model.overrides.num_key_value_heads=4",
    "model.overrides.head_dim=32",
    "model.overrides.intermediate_size=704",
    "model.overrides.vocab_size=257",
    "training.batch_size=8",
    "training.seq_len=256",
    "training.eval_batches=1",
    "training.eval_every=0",
    "generate.max_new_tokens=0",
    "training.steps=7",
    "training.profile_steps=[4, 7]",
];

/// Steps in the window.
const STEPS: f64 = 4.0;

/// Arithmetic and bytes of an operation in a step, if known.
fn cost(name: &str, fp8: bool) -> Option<[f64; 2]> {
    let all = |of: &dyn Fn([usize; 2]) -> usize| LAYERS * LINEARS.iter().map(|shape| of(*shape)).sum::<usize>();
    let [weights, inputs, outputs] = [all(&|[k, n]| k * n), all(&|[k, _]| k) * TOKENS, all(&|[_, n]| n) * TOKENS];
    let (head_weight, head_input, head_output) = (HIDDEN * VOCABULARY, HIDDEN * TOKENS, VOCABULARY * TOKENS);
    let heads = LAYERS * TOKENS * (2 * HIDDEN + 2 * KEYS);
    let (rows, norms) = (TOKENS * HIDDEN, 2 * LAYERS + 1);
    // High-precision linears: only the output layer if the others run in FP8.
    let high = |inner: usize, head: usize| if fp8 { head } else { inner + head };
    let product = |reads: usize, writes: usize| Some([2.0 * (weights * TOKENS) as f64, (reads + 4 * writes) as f64]);
    let linear = Some([
        2.0 * (high(weights, head_weight) * TOKENS) as f64,
        4.0 * (high(weights + inputs + outputs, head_weight + head_input + head_output)) as f64,
    ]);
    // Causal masking halves products of [T, T] by d and similar ones.
    let attention = |products: usize, tensors: usize| {
        Some([(products * LAYERS * TOKENS * LENGTH * HIDDEN) as f64, (4 * tensors * heads) as f64])
    };
    let moved = |elements: usize| Some([0.0, 4.0 * elements as f64]);
    let cast = |elements: usize| Some([0.0, 5.0 * elements as f64]);
    match name {
        "scaled_gemm fprop" => product(weights + inputs, outputs),
        "scaled_gemm dgrad" => product(weights + outputs, inputs),
        "scaled_gemm wgrad" => product(inputs + outputs, weights),
        "linear" | "linear_x_backward" | "linear_weight_backward" => linear,
        // q, k and v share one cast, as do gate and up.
        "cast input e4m3" => cast(LAYERS * TOKENS * (3 * HIDDEN + FFN)),
        "cast weight e4m3" => cast(weights),
        "cast grad_output e5m2" | "cast grad_output e4m3" => cast(outputs),
        "attention" => attention(2, 1),
        "attention_backward" => attention(5, 2),
        "swiglu" => moved(3 * LAYERS * TOKENS * FFN),
        "swiglu_backward" => moved(5 * LAYERS * TOKENS * FFN),
        "rms_norm" => moved(2 * norms * rows),
        "rms_norm_backward" => moved(3 * norms * rows),
        "rotary" | "rotary_backward" => moved(2 * LAYERS * TOKENS * (HIDDEN + KEYS)),
        "log_likelihood" => moved(head_output),
        "log_likelihood_backward" => moved(2 * head_output),
        // Reads parameter, gradient and moments; writes all except the gradient.
        "adamw" => moved(7 * (weights + head_weight + VOCABULARY * HIDDEN)),
        _ => None,
    }
}

/// Floating-point operations per second of Burn's f32 matmul.
fn peak() -> f64 {
    const SIDE: usize = 1024;
    let device = Default::default();
    let [a, b] = [(); 2].map(|()| Tensor::<Flex, 2>::random([SIDE, SIDE], Distribution::Default, &device));
    let times = (0..9).map(|_| {
        let start = Instant::now();
        drop(std::hint::black_box(a.clone().matmul(b.clone())));
        start.elapsed().as_secs_f64()
    });
    2.0 * (SIDE * SIDE * SIDE) as f64 / median(times.collect())
}

/// Memory bandwidth in bytes per second.
fn stream() -> f64 {
    let buffers = [(); 2].map(|()| vec![1_u8; gemv::STREAM / 2]);
    let rates = (0..9).map(|_| gemv::stream([&buffers[0], &buffers[1]]));
    1e9 * median(rates.collect())
}

/// Table of `[profile]` as JSON.
fn profile(settings: &[&str]) -> Value {
    let folder = std::env::temp_dir().join(format!("float8-profile-{}", std::process::id()));
    let to = format!("checkpoint.output_dir={}", folder.display());
    with_job(&[&SETTINGS[..], settings, &[&to]].concat(), |job| {
        let run = job.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut std::io::sink());
        run.expect("it trains")
    });
    let text = std::fs::read_to_string(folder.join("profile.json")).expect("the run has written it");
    std::fs::remove_dir_all(&folder).expect("written above");
    serde_json::from_str(&text).expect("JSON")
}

/// Table in f32 and in FP8.
pub fn table() -> Table {
    let (peak, stream) = (peak(), stream());
    let title = format!(
        "a training step on the CPU, operation by operation: what the machine's limit would take, and of which kind it is; peak {:.0} GFLOP/s, stream {:.1} GB/s",
        peak / 1e9,
        stream / 1e9
    );
    let columns = ["precision", "operation", "calls", "ms", "% of step", "least, ms", "of limit", "limit"];
    let mut table = Table::new(title, &columns);
    for (precision, settings) in [("f32", ["training.precision=f32"]), ("tensorwise", ["float8.recipe=tensorwise"])] {
        let profile = profile(&settings);
        let wall = profile["wall_seconds"].as_f64().expect("a number");
        for row in profile["rows"].as_array().expect("rows") {
            let name = row["name"].as_str().expect("a name").to_string();
            let seconds = row["seconds"].as_f64().expect("a number") / STEPS;
            let least = cost(&name, precision != "f32").map(|[arithmetic, bytes]| {
                let [arithmetic, bytes] = [arithmetic / peak, bytes / stream];
                (1e3 * arithmetic.max(bytes), arithmetic > bytes)
            });
            let calls = Cell::Number(row["calls"].as_f64().unwrap_or_default() / STEPS, 0);
            let (ms, share) = (1e3 * seconds, Cell::Number(100.0 * seconds * STEPS / wall, 1));
            let of_limit = optional(least.map(|(least, _)| number(least / ms)));
            let limit = least.map_or("", |(_, is_arithmetic)| if is_arithmetic { "peak" } else { "stream" });
            let least = optional(least.map(|(least, _)| number(least)));
            table.row([precision.into(), name.into(), calls, number(ms), share, least, of_limit, limit.into()]);
        }
    }
    table
}
