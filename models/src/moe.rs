//! A mixture of SwiGLUs as in Mixtral (arXiv 2401.04088): a router sends each token to the k
//! experts with the highest scores.
//!
//! ```text
//! l = x · router                                    [M, E], f32
//! S = the k largest of l,  p = softmax(l_S)         f32
//! y = Σ_{e in S} p_e · down_e(silu(gate_e(x)) ⊙ up_e(x))
//! ```
//! The k copies of each token are sorted by expert. Each expert's linear then reads adjacent rows,
//! and all experts of a layer run in three grouped GEMMs. The destination of a copy is computed by
//! counting, on the device: no sort, nothing read back.
//!
//! ```text
//! seen[i, e]  how many of the copies 0..=i are expert e's
//! ends[e]     Σ_{e' <= e} seen[last, e']
//! row[i]      ends[e] - seen[last, e] + seen[i, e] - 1,  e the expert of copy i
//! ```
//! Mixtral's auxiliary loss, which balances the experts, is not implemented.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor};
use burn_float8::GroupedLinear;
use burn_float8::nn::{Dispatched, dispatch, swiglu};

use crate::dims::MoeConfig;
use crate::linear::{INITIALIZER, linear};

/// Router and experts of one layer.
#[derive(Module, Debug)]
pub struct Moe<B: Backend> {
    /// `[H, E]`.
    pub router: Linear<B>,
    /// E SwiGLUs.
    pub experts: Experts<B>,
    num_experts_per_tok: usize,
}

/// Grouped SwiGLUs: `down(silu(gate(x)) ⊙ up(x))`, each row of x with its expert.
#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    /// `[E, H, intermediate]`.
    pub gate_proj: GroupedLinear<B>,
    /// `[E, H, intermediate]`.
    pub up_proj: GroupedLinear<B>,
    /// `[E, intermediate, H]`.
    pub down_proj: GroupedLinear<B>,
}

impl<B: Backend> Moe<B> {
    pub(crate) fn new(hidden: usize, intermediate: usize, config: MoeConfig, device: &B::Device) -> Self {
        let MoeConfig { num_experts, num_experts_per_tok } = config;
        let grouped = |d_input, d_output| GroupedLinear::new(num_experts, d_input, d_output, &INITIALIZER, device);
        Self {
            router: linear(hidden, num_experts, device),
            experts: Experts {
                gate_proj: grouped(hidden, intermediate),
                up_proj: grouped(hidden, intermediate),
                down_proj: grouped(intermediate, hidden),
            },
            num_experts_per_tok,
        }
    }

    /// `[M, H]` → `[M, H]`, in x's dtype. M is at least 1.
    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let ([tokens, hidden], dtype) = (x.dims(), x.dtype());
        let copies = self.num_experts_per_tok;
        let logits = self.router.forward(x.clone().cast(DType::F32));
        let chosen = top_k(logits.clone(), copies);
        let probabilities = softmax(logits.gather(1, chosen.clone()), 1);
        let num_experts = self.router.weight.dims()[1];
        let Routing { ends, row } = Routing::new(chosen, num_experts);

        // Copied first, so that moving rows is a permutation in forward and backward, without
        // collisions.
        let x = x.unsqueeze_dim::<3>(1).expand([tokens, copies, hidden]).reshape([tokens * copies, hidden]);
        let x = x.zeros_like().scatter_nd(row.clone(), x, IndexingUpdateOp::Add);
        // To the ranks that have the experts, if ranks divide them.
        let Dispatched { x, ends, route } = dispatch(x, ends, &self.experts.gate_proj.weight.val());
        let y = route.combine(self.experts.forward(x, ends));
        let y = y.gather_nd::<2, 2>(row).reshape([tokens, copies, hidden]).cast(DType::F32);
        let y = (y * probabilities.unsqueeze_dim(2)).sum_dim(1);
        y.reshape([tokens, hidden]).cast(dtype)
    }
}

impl<B: Backend> Experts<B> {
    /// `[M, H]` → `[M, H]`; expert e has the rows `ends[e - 1]..ends[e]`.
    fn forward(&self, x: Tensor<B, 2>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        let gate = self.gate_proj.forward(x.clone(), ends.clone());
        let up = self.up_proj.forward(x, ends.clone());
        self.down_proj.forward(swiglu(gate, up), ends)
    }
}

/// Columns of the `k` largest values of each row, largest first: `[M, E]` → `[M, k]`.
fn top_k<B: Backend>(scores: Tensor<B, 2>, k: usize) -> Tensor<B, 2, Int> {
    let columns = scores.dims()[1];
    let mut rest = scores.detach();
    let mut chosen = Vec::with_capacity(k);
    for _ in 0..k {
        let best = rest.clone().argmax(1);
        // Finite, because WGSL need not represent infinities.
        rest = rest.mask_fill(one_hot(best.clone(), columns), f32::MIN);
        chosen.push(best);
    }
    Tensor::cat(chosen, 1)
}

/// Mask of column `index`: `[M, 1]` → `[M, columns]`.
fn one_hot<B: Backend>(index: Tensor<B, 2, Int>, columns: usize) -> Tensor<B, 2, Bool> {
    let columns = Tensor::<B, 1, Int>::arange(0..columns as i64, &index.device());
    index.equal(columns.unsqueeze())
}

/// Destinations of the copies of tokens, sorted by expert. Copies of one expert keep their order.
struct Routing<B: Backend> {
    /// End of the rows of each expert, `[E]`.
    ends: Tensor<B, 1, Int>,
    /// Row of each copy, `[M·k, 1]`: always a permutation.
    row: Tensor<B, 2, Int>,
}

impl<B: Backend> Routing<B> {
    /// Routing for the chosen experts of each token, `[M, k]`.
    fn new(chosen: Tensor<B, 2, Int>, num_experts: usize) -> Self {
        let [tokens, per_token] = chosen.dims();
        let copies = tokens * per_token;
        let chosen = chosen.reshape([copies, 1]);
        let chosen = one_hot(chosen, num_experts).int();
        let seen = cumsum_of_rows(chosen.clone());
        let counts = seen.clone().narrow(0, copies - 1, 1);
        let ends = counts.clone().cumsum(1);
        let starts = ends.clone() - counts;
        // Burn's fused `gather` of one column reads past its indices on CUDA: sum over the mask instead.
        let row = ((seen + starts) * chosen).sum_dim(1).sub_scalar(1);
        Self { ends: ends.reshape([num_experts]), row }
    }
}

/// `out[i] = Σ_{j <= i} x[j]`: `[M, E]` → `[M, E]`.
///
/// Computed in about √M parts, and then over their sums: on CubeCL's backends the work of
/// `Tensor::cumsum` grows with the square of the length.
fn cumsum_of_rows<B: Backend>(x: Tensor<B, 2, Int>) -> Tensor<B, 2, Int> {
    let [rows, columns] = x.dims();
    let part = rows.isqrt();
    let parts = rows.div_ceil(part);
    let x = match parts * part - rows {
        0 => x,
        missing => {
            let zeros = Tensor::zeros([missing, columns], &x.device());
            Tensor::cat(vec![x, zeros], 0)
        }
    };
    let within = x.reshape([parts, part, columns]).cumsum(1);
    let sums = within.clone().narrow(1, part - 1, 1);
    let before = sums.clone().cumsum(0) - sums;
    (within + before).reshape([parts * part, columns]).narrow(0, 0, rows)
}
