//! y, dx, dw and db of the decorator against the definition, in f64: dequantized operands, exactly multiplied.
use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::module::linear;
use burn_float8::{Float8, Float8Backend, Recipe, Role};
use float8_kernels::reference;

use crate::on_every_runtime;
use crate::support::operand::{tensor, values};
use crate::support::{max_error, normal};

/// What the GEMMs see of a tensor: decode(code) / scale.
fn dequantized(x: &[f32], role: Role) -> Vec<f64> {
    let cast = Recipe::Tensorwise.cast(role);
    let (codes, _, scale) = reference::quantize(x, 1, x.len(), cast);
    let inv_scale = f64::from(scale.inverse().get());
    codes.iter().map(|c| f64::from(reference::decode(*c, cast.format)) * inv_scale).collect()
}

/// a `[m, k]` · b `[k, n]`, by strides.
fn matmul(a: &[f64], sa: [usize; 2], b: &[f64], sb: [usize; 2], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let at = |i: usize, j: usize| (0..k).map(|c| a[i * sa[0] + c * sa[1]] * b[c * sb[0] + j * sb[1]]).sum::<f64>();
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| at(i, j) as f32).collect()
}

fn gradients_on<B: Float8Backend>(runtime: &str) {
    type A<B> = Autodiff<Float8<B>>;
    let [batch, tokens, k, n] = [3, 7, 37, 21];
    let m = batch * tokens;
    let (xs, ws, bs, dys) = (normal(m * k, 1), normal(k * n, 2), normal(n, 3), normal(m * n, 4));
    let x = tensor::<A<B>, 3>(xs.clone(), [batch, tokens, k]).require_grad();
    let w = tensor::<A<B>, 2>(ws.clone(), [k, n]).require_grad();
    let b = tensor::<A<B>, 1>(bs.clone(), [n]).require_grad();
    let dy: Tensor<A<B>, 3> = tensor(dys.clone(), [batch, tokens, n]);
    let y = linear(x.clone(), w.clone(), Some(b.clone()));
    let grads = (y.clone() * dy).sum().backward();

    let [xq, wq, dyq] = [(xs, Role::Input), (ws, Role::Weight), (dys.clone(), Role::GradOutput)]
        .map(|(values, role)| dequantized(&values, role));
    let mut y_exact = matmul(&xq, [k, 1], &wq, [n, 1], [m, k, n]);
    y_exact.iter_mut().enumerate().for_each(|(i, v)| *v += bs[i % n]);
    let dx_exact = matmul(&dyq, [n, 1], &wq, [1, n], [m, n, k]);
    let dw_exact = matmul(&xq, [1, k], &dyq, [n, 1], [k, m, n]);
    let db_exact: Vec<_> = (0..n).map(|j| (0..m).map(|i| f64::from(dys[i * n + j])).sum::<f64>() as f32).collect();
    for (name, ours, exact) in [
        ("y", values(y), y_exact),
        ("dx", values(x.grad(&grads).unwrap()), dx_exact),
        ("dw", values(w.grad(&grads).unwrap()), dw_exact),
        ("db", values(b.grad(&grads).unwrap()), db_exact),
    ] {
        // Sums of at most 37 terms below 25: f32 rounding stays well under 1e-4.
        let error = max_error(&ours, &exact);
        assert!(error < 1e-4, "{runtime} {name}: {error:e}");
    }
}

#[test]
fn gradients_equal_their_definition() {
    on_every_runtime!(gradients_on);
}
