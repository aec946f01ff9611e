//! Linears by their definition in f64: operands by the scalar reference, products one element at a
//! time.
use burn_float8::Float8LinearConfig;
use burn_float8::config::{CastConfig, Operand};
use float8_kernels::{Cast, reference};
use kernel_tests::{Element, Factor, HostMatrix, products};
use test_data::transpose;

/// Result of a GEMM, with the length of its contraction.
pub struct Exact {
    pub elements: Vec<Element>,
    pub len: usize,
}

/// Operand `[rows, k]` of a GEMM: x, or its cast. `scaling_amax` replaces the amax of x, for casts
/// with one scale.
pub fn factor(
    x: &[f32],
    shape: [usize; 2],
    cast: CastConfig,
    config: &Float8LinearConfig,
    scaling_amax: Option<f32>,
) -> Factor {
    matrix(x, shape, cast, config, scaling_amax).map_or_else(|| Factor::plain(x, shape), |matrix| Factor::of(&matrix))
}

/// Codes and scales of x `[rows, k]`, unless the cast is disabled.
pub fn matrix(
    x: &[f32],
    shape: [usize; 2],
    cast: CastConfig,
    config: &Float8LinearConfig,
    scaling_amax: Option<f32>,
) -> Option<HostMatrix> {
    let (format, granularity) = (cast.target_dtype, cast.scaling_granularity);
    let scale_mode = config.scale_mode(granularity);
    let mut matrix =
        (!cast.is_disabled()).then(|| HostMatrix::cast(x, shape, Cast { format, granularity, scale_mode }))?;
    if let Some(amax) = scaling_amax {
        let scale = reference::amax_to_scale(amax, format, scale_mode);
        reference::cast(x, scale, format, &mut matrix.codes);
        matrix.inv_scales = vec![scale.inverse()];
    }
    Some(matrix)
}

/// `A [M, K] · B [N, K]ᵀ`
fn product(a: &Factor, b: &Factor, len: usize) -> Exact {
    Exact { elements: products(a, b), len }
}

/// y `[M, N]`, dx `[M, K]`, dw `[K, N]` and, with a bias, db `[N]` of a linear.
pub fn linear(
    [x, w, dy]: [&[f32]; 3],
    [m, k, n]: [usize; 3],
    bias: Option<&[f32]>,
    config: &Float8LinearConfig,
    [ax, aw, ady]: [Option<f32>; 3],
) -> Vec<Exact> {
    let casts = config.casts();
    let of = |x: &[f32], shape, operand, amax| factor(x, shape, casts[operand], config, amax);
    // w is read transposed in fprop, x and dy in wgrad.
    let [xt, wt, dyt] = [(x, [m, k]), (w, [k, n]), (dy, [m, n])].map(|(x, shape)| transpose(x, shape));
    let mut y = product(&of(x, [m, k], Operand::INPUT, ax), &of(&wt, [n, k], Operand::WEIGHT_T, aw), k);
    let dx = product(&of(dy, [m, n], Operand::GRAD_OUTPUT, ady), &of(w, [k, n], Operand::WEIGHT, aw), n);
    let dw = product(&of(&xt, [k, m], Operand::INPUT_T, ax), &of(&dyt, [n, m], Operand::GRAD_OUTPUT_T, ady), m);
    let Some(bias) = bias else { return vec![y, dx, dw] };
    for (i, y) in y.elements.iter_mut().enumerate() {
        let bias = f64::from(bias[i % n]);
        *y = Element { want: y.want + bias, size: y.size + bias.abs() };
    }
    let db = product(&Factor::plain(&vec![1.0; m], [1, m]), &Factor::plain(&dyt, [n, m]), m);
    vec![y, dx, dw, db]
}

/// Checks that `|got − exact| ≤ (2·len + 8) · 2⁻²⁴ · Σ|a·b| + unit · |exact|` for each element.
///
/// The first term covers f32 sums and a rounding for each scale, `unit` the rounding to a result's
/// dtype.
pub fn assert_within(what: &str, got: &[Vec<f32>], exact: &[Exact], units: [f64; 3]) {
    assert_eq!(got.len(), exact.len(), "{what}");
    for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
        let name = ["y", "dx", "dw", "db"][i];
        assert_eq!(got.len(), exact.elements.len(), "{what} {name}");
        for (j, (got, element)) in got.iter().zip(&exact.elements).enumerate() {
            let Element { want, size } = *element;
            let unit = units.get(i).copied().unwrap_or_default();
            let bound = (2 * exact.len + 8) as f64 * 2f64.powi(-24) * size + unit * want.abs();
            let error = (f64::from(*got) - want).abs();
            assert!(error <= bound, "{what} {name}[{j}] is {got:e}, not {want:e}: {error:e} above {bound:e}");
        }
    }
}
