//! Causal attention on the CPU, forward and backward: the node against Burn's operations on
//! autodiff, which keep the scores.
use std::time::Instant;

use benches::table::Table;
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Tensor, TensorData};
use burn_float8::{Float8, nn::attention};
use serde_json::json;
use test_data::{Counting, normal};

use crate::{medians, mib};

/// Query heads and key heads.
const HEADS: [usize; 2] = [8, 4];
const DIM: usize = 64;
/// Tokens of a batch; shorter sequences come in larger batches.
const TOKENS: usize = 2048;
/// Several copies of longer sequences' scores exceed 16 GiB of memory.
const LONGEST_MATERIALIZED: usize = 4096;

/// Milliseconds of forward and backward.
fn step<B: AutodiffBackend>(sequences: usize, seq_len: usize) -> impl Fn() -> f64 {
    let random = |heads, seed| {
        let shape = [sequences, heads, seq_len, DIM];
        let data = TensorData::new(normal(shape.iter().product(), seed), shape);
        Tensor::<B, 4>::from_data(data, &B::Device::default()).require_grad()
    };
    let [heads, kv_heads] = HEADS;
    let (q, k, v, dy) = (random(heads, 1), random(kv_heads, 2), random(kv_heads, 3), random(heads, 4).detach());
    move || {
        let start = Instant::now();
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = attention(q.clone(), k.clone(), v.clone(), None, options);
        let grads = (y * dy.clone()).sum().backward();
        assert!(k.grad(&grads).is_some());
        start.elapsed().as_secs_f64() * 1e3
    }
}

/// Table by sequence length.
pub fn table(repeat: u32) -> Table {
    let [heads, kv_heads] = HEADS;
    let title = format!(
        "causal attention on the CPU, f32, {heads} heads of {DIM}, {kv_heads} key heads: forward and backward; ratios to materialized scores"
    );
    let mut table = Table::new(title);
    for seq_len in [128, 256, 512, 1024, 2048, 4096, 8192] {
        let sequences = (TOKENS / seq_len).max(1);
        let node = step::<Float8<Autodiff<Flex>>>(sequences, seq_len);
        // On a backend without `Float8` this is Burn's attention.
        let materialized = (seq_len <= LONGEST_MATERIALIZED).then(|| step::<Autodiff<Flex>>(sequences, seq_len));
        let peak = |step: &dyn Fn() -> f64| {
            mib(Counting::peak_of(|| {
                step();
            }))
        };
        let peaks = (peak(&node), materialized.as_ref().map(|other| peak(other)));
        let [ms, other] = medians(repeat, &node, || materialized.as_ref().map_or(f64::NAN, |other| other()));
        table.rows.push(json!({
            "tokens": [sequences, seq_len], "ms": ms, "ratio": materialized.map(|_| ms / other), "MiB": peaks.0,
            "materialized MiB": peaks.1,
        }));
    }
    table
}
