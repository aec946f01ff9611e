//! Operations around linears, forward and backward: `burn_float8::nn` against Burn's operations on
//! autodiff, which fuse if the backend does.

use burn::backend::Autodiff;
use burn::tensor::activation::silu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Distribution, Tensor};
use burn_float8::{Float8, nn};
use serde::{Deserialize, Serialize};

use super::timing::{Clock, or_dash};
use super::torch::Results;
use super::{Bench, Size, headed};
use crate::target::Target;

const EPSILON: f64 = 1e-5;

/// One operation.
#[derive(Serialize, Deserialize)]
pub struct Row {
    what: String,
    shape: Vec<usize>,
    milliseconds: f64,
    burn_milliseconds: f64,
    /// Time of Burn's operations / time of this.
    speedup: f64,
}

/// Operation with the shape of its inputs.
#[derive(Clone, Copy)]
enum Work {
    /// gate and up `[M, F]`.
    SwiGlu([usize; 2]),
    /// x `[M, H]`.
    RmsNorm([usize; 2]),
    /// x `[B, T, heads, d]`.
    Rotary([usize; 4]),
    /// q, k and v `[B, heads, T, d]`, causal.
    Attention([usize; 4]),
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::SwiGlu(_) => "swiglu",
            Self::RmsNorm(_) => "rms_norm",
            Self::Rotary(_) => "rotary",
            Self::Attention(_) => "attention",
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::SwiGlu(shape) | Self::RmsNorm(shape) => shape,
            Self::Rotary(shape) | Self::Attention(shape) => shape,
        }
    }

    /// Returns a closure that runs a step: forward, and the gradients of all inputs.
    fn step<B: AutodiffBackend>(self, dtype: DType, by_nodes: bool) -> Box<dyn Fn()> {
        match self {
            Self::SwiGlu(shape) => {
                let inputs = leaves::<B, 2, 2>(shape, dtype);
                Box::new(move || {
                    let [a, b] = inputs.clone();
                    backward(if by_nodes { nn::swiglu(a, b) } else { silu(a) * b });
                })
            }
            Self::RmsNorm(shape) => {
                let ([x], [gamma]) = (leaves::<B, 2, 1>(shape, dtype), leaves::<B, 1, 1>([shape[1]], dtype));
                Box::new(move || {
                    let (x, gamma) = (x.clone(), gamma.clone());
                    backward(if by_nodes { nn::rms_norm(x, gamma, EPSILON) } else { rms_norm(x, gamma, dtype) });
                })
            }
            Self::Rotary(shape @ [_, len, _, dim]) => {
                let [x] = leaves::<B, 4, 1>(shape, dtype);
                let [cos, sin] = leaves::<B, 2, 2>([len, dim / 2], DType::F32).map(Tensor::detach);
                Box::new(move || {
                    let (x, cos, sin) = (x.clone(), cos.clone(), sin.clone());
                    backward(if by_nodes { nn::rotary(x, cos, sin) } else { rotary(x, [cos, sin], dtype) });
                })
            }
            Self::Attention(shape) => {
                let inputs = leaves::<B, 4, 3>(shape, dtype);
                // On `Float8` this is the node.
                Box::new(move || {
                    let [q, k, v] = inputs.clone();
                    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
                    backward(attention(q, k, v, None, None, options));
                })
            }
        }
    }
}

fn leaves<B: AutodiffBackend, const D: usize, const N: usize>(shape: [usize; D], dtype: DType) -> [Tensor<B, D>; N] {
    let leaf = || Tensor::<B, D>::random(shape, Distribution::Normal(0.0, 1.0), &Default::default());
    [(); N].map(|()| leaf().cast(dtype).detach().require_grad())
}

fn backward<B: AutodiffBackend, const D: usize>(y: Tensor<B, D>) {
    drop(y.sum().backward());
}

fn rms_norm<B: Backend>(x: Tensor<B, 2>, gamma: Tensor<B, 1>, dtype: DType) -> Tensor<B, 2> {
    let x = x.cast(DType::F32);
    let inverse_rms = (x.clone().square().mean_dim(1) + EPSILON).sqrt().recip();
    (x * inverse_rms * gamma.cast(DType::F32).unsqueeze()).cast(dtype)
}

fn rotary<B: Backend>(x: Tensor<B, 4>, tables: [Tensor<B, 2>; 2], dtype: DType) -> Tensor<B, 4> {
    let half = x.dims()[3] / 2;
    let x = x.cast(DType::F32).swap_dims(1, 2);
    let (first, second) = (x.clone().slice_dim(3, 0..half), x.slice_dim(3, half..2 * half));
    let [cos, sin] = tables.map(|table| table.unsqueeze::<4>());
    let y = first.clone() * cos.clone() - second.clone() * sin.clone();
    Tensor::cat(vec![y, second * cos + first * sin], 3).cast(dtype)
}

const TINY: [Work; 4] =
    [Work::SwiGlu([64, 96]), Work::RmsNorm([64, 96]), Work::Rotary([1, 32, 2, 16]), Work::Attention([1, 2, 32, 16])];
const FULL: [Work; 5] = [
    Work::Attention([1, 32, 8192, 128]),
    Work::SwiGlu([8192, 14_336]),
    Work::RmsNorm([8192, 4096]),
    Work::Rotary([1, 8192, 32, 128]),
    Work::Attention([4, 32, 2048, 128]),
];

/// Shapes of attention, for torch.
pub fn attention_shapes(size: Size) -> Vec<String> {
    let shape = |work: &Work| match work {
        Work::Attention([batch, heads, len, dim]) => Some(format!("{batch}x{heads}x{len}x{dim}")),
        _ => None,
    };
    size.of(&TINY, 5, &FULL).iter().filter_map(shape).collect()
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    for work in bench.size.of(&TINY, 5, &FULL) {
        let (what, shape) = (work.name().to_string(), work.shape().to_vec());
        bench.case(&format!("beside {what} {shape:?}"), |clock| {
            let dtype = T::compute_dtype();
            let nodes = work.step::<Float8<Autodiff<T::Backend>>>(dtype, true);
            let seconds = clock.seconds::<T>(|_| nodes());
            drop(nodes);
            let plain = work.step::<Autodiff<T::Backend>>(dtype, false);
            let burn = clock.seconds::<T>(|_| plain());
            let [milliseconds, burn_milliseconds] = [seconds, burn].map(|seconds| seconds * 1e3);
            Ok(super::Row::Beside(Row { what, shape, milliseconds, burn_milliseconds, speedup: burn / seconds }))
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
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        backward(nn::attention(q.clone(), k.clone(), v.clone(), None, options));
    })
}

pub fn print(rows: &[Row], torch: &Results) {
    if rows.is_empty() {
        return;
    }
    headed("forward + backward beside the linears");
    println!(
        "{:<10}  {:<22}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}",
        "what", "shape", "ms", "Burn's ms", "to Burn's", "flash ms", "cuDNN ms"
    );
    for Row { what, shape, milliseconds, burn_milliseconds, speedup } in rows {
        let found = torch.attention(shape);
        let [flash, cudnn] = [found.and_then(|row| row.flash_ms), found.and_then(|row| row.cudnn_ms)];
        let (shape, flash, cudnn) = (format!("{shape:?}"), or_dash(flash, 3), or_dash(cudnn, 3));
        println!(
            "{what:<10}  {shape:<22}  {milliseconds:>9.3}  {burn_milliseconds:>9.3}  {speedup:>9.2}  {flash:>9}  {cudnn:>9}"
        );
    }
}
