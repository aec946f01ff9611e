//! Causal attention on the CPU, forward and backward: the node against Burn's operations on
//! autodiff, which keep the scores.
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Tensor, TensorData};
use burn_float8::{Float8, nn::attention};
use serde::Serialize;
use test_data::{Counting, normal};

use crate::medians;

/// Query heads and key heads.
const HEADS: [usize; 2] = [8, 4];
const DIM: usize = 64;
/// Tokens of a batch; shorter sequences come in larger batches.
const TOKENS: usize = 2048;
/// Several copies of longer sequences' scores exceed 16 GiB of memory.
const LONGEST_MATERIALIZED: usize = 4096;

/// One sequence length.
#[derive(Serialize)]
pub struct Row {
    seq_len: usize,
    sequences: usize,
    /// Median milliseconds of forward and backward.
    ms: f64,
    /// Ratio to the materialized scores' time; None if those did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// Peak bytes above the bytes live before.
    peak_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    materialized_peak_bytes: Option<usize>,
}

/// Forward and backward.
fn step<B: AutodiffBackend>(sequences: usize, seq_len: usize) -> impl Fn() {
    let random = |heads, seed| {
        let shape = [sequences, heads, seq_len, DIM];
        let data = TensorData::new(normal(shape.iter().product(), seed), shape);
        Tensor::<B, 4>::from_data(data, &B::Device::default()).require_grad()
    };
    let [heads, kv_heads] = HEADS;
    let (q, k, v, dy) = (random(heads, 1), random(kv_heads, 2), random(kv_heads, 3), random(heads, 4).detach());
    move || {
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = attention(q.clone(), k.clone(), v.clone(), None, options);
        let grads = (y * dy.clone()).sum().backward();
        assert!(k.grad(&grads).is_some());
    }
}

fn timed(step: &impl Fn()) -> impl FnMut() -> f64 {
    move || {
        let start = Instant::now();
        step();
        start.elapsed().as_secs_f64() * 1e3
    }
}

pub fn rows(repeat: u32) -> Vec<Row> {
    let row = |seq_len: usize| {
        let sequences = (TOKENS / seq_len).max(1);
        let node = step::<Float8<Autodiff<Flex>>>(sequences, seq_len);
        // On a backend without `Float8` this is Burn's attention.
        let materialized = (seq_len <= LONGEST_MATERIALIZED).then(|| step::<Autodiff<Flex>>(sequences, seq_len));
        let peak_bytes = Counting::peak_of(&node);
        let materialized_peak_bytes = materialized.as_ref().map(Counting::peak_of);
        let [ms, other] = match &materialized {
            Some(other) => medians(repeat, timed(&node), timed(other)),
            None => medians(repeat, timed(&node), || f64::NAN),
        };
        let ratio = materialized.is_some().then_some(ms / other);
        Row { seq_len, sequences, ms, ratio, peak_bytes, materialized_peak_bytes }
    };
    [128, 256, 512, 1024, 2048, 4096, 8192].map(row).into()
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let [heads, kv_heads] = HEADS;
    println!(
        "\ncausal attention on the CPU, f32, {heads} heads of {DIM}, {kv_heads} key heads: forward and backward; ratios to materialized scores"
    );
    println!("{:>8}  {:>10}  {:>6}  {:>9}  {:>9}", "tokens", "ms", "ratio", "MiB", "materialized");
    for Row { seq_len, sequences, ms, ratio, peak_bytes, materialized_peak_bytes } in rows {
        let mib = |bytes: usize| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let ratio = ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
        let other = materialized_peak_bytes.map(mib).unwrap_or_default();
        println!(
            "{:>8}  {ms:>10.2}  {ratio:>6}  {:>9}  {other:>9}",
            format!("{sequences} x {seq_len}"),
            mib(*peak_bytes)
        );
    }
}
