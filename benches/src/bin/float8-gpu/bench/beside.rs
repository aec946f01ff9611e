//! Operations around linears, forward and backward: `burn_float8::nn` against Burn's operations on
//! autodiff, which fuse if the backend does.

use benches::ops::{self, EPSILON};
use burn::backend::Autodiff;
use burn::tensor::activation::silu;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Distribution, Tensor};
use burn_float8::{Float8, nn};
use float8_kernels::attention::{AttentionKernel, AttentionSchedule, fix_attention_schedule};
use serde_json::json;

use super::timing::Clock;
use super::{Bench, Size};
use crate::target::Target;

/// Operations with the shape of their largest input: `[1, 1, M, F]`, `[1, 1, M, H]`,
/// `[B, T, heads, d]`, and `[B, heads, T, d]` of causal attention.
const TINY: [(&str, [usize; 4]); 4] = [
    ("swiglu", [1, 1, 64, 96]),
    ("rms_norm", [1, 1, 64, 96]),
    ("rotary", [1, 32, 2, 16]),
    ("attention", [1, 2, 32, 16]),
];
const FULL: [(&str, [usize; 4]); 5] = [
    ("attention", [1, 32, 8192, 128]),
    ("swiglu", [1, 1, 8192, 14_336]),
    ("rms_norm", [1, 1, 8192, 4096]),
    ("rotary", [1, 8192, 32, 128]),
    ("attention", [4, 32, 2048, 128]),
];

/// Milliseconds of a step: forward, and the gradients of all inputs.
fn milliseconds<T: Target, B: AutodiffBackend>(clock: Clock, (what, shape): (&str, [usize; 4]), by_nodes: bool) -> f64 {
    let dtype = T::compute_dtype();
    let ([gamma], inputs) = (leaves::<B, 1, 1>([shape[3]], dtype), leaves::<B, 4, 3>(shape, dtype));
    let [cos, sin] = leaves::<B, 2, 2>([shape[1], shape[3] / 2], DType::F32).map(Tensor::detach);
    let seconds = clock.seconds::<T>(|_| {
        let ([x, y, z], gamma, cos, sin) = (inputs.clone(), gamma.clone(), cos.clone(), sin.clone());
        let out = match (what, by_nodes) {
            ("swiglu", true) => nn::swiglu(x, y),
            ("swiglu", false) => silu(x) * y,
            ("rms_norm", true) => nn::rms_norm(x, gamma, EPSILON),
            ("rms_norm", false) => ops::rms_norm(x, gamma),
            ("rotary", true) => nn::rotary(x, cos, sin),
            ("rotary", false) => ops::rotary(x, cos, sin),
            // On a backend without `Float8` this is Burn's attention.
            _ => nn::attention(x, y, z, None, causal()),
        };
        drop(out.sum().backward());
    });
    seconds * 1e3
}

fn causal() -> AttentionModuleOptions {
    AttentionModuleOptions { is_causal: true, ..Default::default() }
}

fn leaves<B: AutodiffBackend, const D: usize, const N: usize>(shape: [usize; D], dtype: DType) -> [Tensor<B, D>; N] {
    let leaf = || Tensor::<B, D>::random(shape, Distribution::Normal(0.0, 1.0), &Default::default());
    [(); N].map(|()| leaf().cast(dtype).detach().require_grad())
}

/// Shapes of attention, for torch.
pub fn attention_shapes(size: Size) -> String {
    let works = size.of(&TINY, 5, &FULL).into_iter().filter(|(what, _)| *what == "attention");
    works.map(|(_, [batch, heads, len, dim])| format!("{batch}x{heads}x{len}x{dim}")).collect::<Vec<_>>().join(",")
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    for work @ (what, shape) in bench.size.of(&TINY, 5, &FULL) {
        bench.case(&format!("beside {what} {shape:?}"), |clock| {
            let ours = milliseconds::<T, Float8<Autodiff<T::Backend>>>(clock, work, true);
            let burn = milliseconds::<T, Autodiff<T::Backend>>(clock, work, false);
            let has_schedules = what == "attention" && AttentionKernel::Wgmma.runs_on(&T::client());
            let schedules = has_schedules.then(|| {
                let others = [AttentionSchedule::Overlapped, AttentionSchedule::PingPong].map(|schedule| {
                    fix_attention_schedule(schedule);
                    milliseconds::<T, Float8<Autodiff<T::Backend>>>(clock, work, true)
                });
                fix_attention_schedule(AttentionSchedule::default());
                [ours, others[0], others[1]]
            });
            // Torch has attention only.
            Ok(json!({
                "what": what, "shape": shape, "milliseconds": ours, "burn_milliseconds": burn, "to_burn": burn / ours,
                "torch_bf16": null, "plain_overlapped_ping_pong": schedules,
            }))
        });
    }
}

/// Median seconds of causal attention, forward and backward.
///
/// Queries are `[B, heads, T, d]`, keys and values `[B, kv_heads, T, d]`.
pub fn attention_seconds<T: Target>(clock: Clock, [heads, kv_heads]: [usize; 2], [batch, len, dim]: [usize; 3]) -> f64 {
    type B<T> = Float8<Autodiff<<T as Target>::Backend>>;
    let dtype = T::compute_dtype();
    let [q] = leaves::<B<T>, 4, 1>([batch, heads, len, dim], dtype);
    let [k, v] = leaves::<B<T>, 4, 2>([batch, kv_heads, len, dim], dtype);
    clock.seconds::<T>(|_| {
        drop(nn::attention(q.clone(), k.clone(), v.clone(), None, causal()).sum().backward());
    })
}
