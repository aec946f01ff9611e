//! [`grouped_matmul`]: a grouped linear in high precision, on any backend.
use burn::tensor::{Int, Tensor};
use burn_backend::Backend;

use super::host::ranges;

/// # Panics
///
/// If the shapes do not match.
pub(crate) fn check_shapes<B: Backend>(x: &Tensor<B, 2>, weight: &Tensor<B, 3>, ends: &Tensor<B, 1, Int>) {
    let (x, weight, [ends]) = (x.dims(), weight.dims(), ends.dims());
    if x[1] != weight[1] || ends != weight[0] || weight.contains(&0) {
        panic!(
            "a grouped linear of x {x:?}, weight {weight:?} and {ends} ends: x is [M, K], the weight [G, K, N], ends are G"
        );
    }
}

/// Computes [`grouped_linear`](crate::grouped_linear) in x's dtype with Burn's operations, on any
/// backend: x `[M, K]`, weight `[G, K, N]`, ends `[G]`. Runs one matmul for each group that has
/// rows. Reads the ends, which waits for the device.
///
/// # Panics
///
/// If the shapes do not match.
pub fn grouped_matmul<B: Backend>(x: Tensor<B, 2>, weight: Tensor<B, 3>, ends: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    check_shapes(&x, &weight, &ends);
    let (rows, dtype, device) = (x.dims()[0], x.dtype(), x.device());
    let n = weight.dims()[2];
    let weight = weight.cast(dtype);
    let ranges = ranges::<B>(&ends.into_primitive(), rows);
    let rest = rows - ranges.last().map_or(0, |last| last.end);
    let full = ranges.into_iter().enumerate().filter(|(_, range)| !range.is_empty());
    let of_group = |(g, range)| x.clone().slice(range).matmul(weight.clone().slice(g..g + 1).squeeze_dim(0));
    let mut parts: Vec<_> = full.map(of_group).collect();
    if rest > 0 || parts.is_empty() {
        parts.push(Tensor::zeros([rest, n], (&device, dtype)));
    }
    Tensor::cat(parts, 0)
}
