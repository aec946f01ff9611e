//! MXFP8: accuracy of the recipes on a linear of usual size, and square scales.
use burn::backend::Autodiff;
use burn_float8::backend::{Cast, Float8Backend};
use burn_float8::config::{Format, Granularity};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe, report};
use float8_kernels::ScaleCalculationMode::{Ceil, Even, Floor, Rceil};
use float8_kernels::{InvScale, ScaleMode, reference};

use crate::on_every_runtime;
use crate::support::linear::{forward_backward, layer};
use crate::support::operand::{quantize, tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, spread, sqnr};

/// SQNR against f32, for normal x `[1024, 1024]` and w `[1024, 2048]`: 27, 25 and 24 dB for y, dx
/// and dw. A dw whose GEMM is in high precision keeps 34 dB.
#[test]
fn a_linear_keeps_its_signal() {
    let [m, k, n] = [1024, 1024, 2048];
    let (x, w, dy) = (normal(m * k, 1), normal(k * n, 2), normal(m * n, 3));
    let load = |values: &[f32], shape| tensor::<Autodiff<Flex>, 2>(values.to_vec(), shape).require_grad();
    let (x_hp, w_hp) = (load(&x, [m, k]), load(&w, [k, n]));
    let y_hp = x_hp.clone().matmul(w_hp.clone());
    let grads = (y_hp.clone() * load(&dy, [m, n])).sum().backward();
    let exact = [values(y_hp), values(x_hp.grad(&grads).unwrap()), values(w_hp.grad(&grads).unwrap())];
    for (recipe, floors) in [(Recipe::Mxfp8, [27.0, 25.0, 24.0]), (Recipe::Mxfp8WgradWithHp, [27.0, 25.0, 34.0])] {
        let layer = layer::<Flex>(&Float8Config::new(recipe), tensor(w.clone(), [k, n]), None);
        let ours = forward_backward(&layer, tensor(x.clone(), [m, k]), tensor::<_, 2>(dy.clone(), [m, n]));
        let calls = report(&layer).layers[0].gemms().map(|(_, gemm)| [gemm.emulated, gemm.high_precision]);
        let wgrad = if recipe == Recipe::Mxfp8 { [1, 0] } else { [0, 1] };
        assert_eq!(calls, [[1, 0], [1, 0], wgrad], "{recipe}");
        for (((what, ours), exact), floor) in ["y", "dx", "dw"].iter().zip(&ours).zip(&exact).zip(floors) {
            let sqnr = sqnr(ours, exact);
            println!("{recipe} {what}: {sqnr:.1} dB");
            assert!(sqnr >= floor, "{recipe} {what}: {sqnr} dB");
        }
    }
}

/// Codes and scales of 32 by 32 squares, in both orientations, by their definition.
fn squares_on<B: Float8Backend>(runtime: &str) {
    for (dims @ [rows, cols], mode) in
        [([3, 5], Rceil), ([32, 64], Floor), ([70, 150], Rceil), ([150, 70], Even), ([129, 33], Ceil)]
    {
        let what = format!("{dims:?} {mode} on {runtime}");
        let mut x = spread(rows, cols, 4);
        // One square of zeros, if there is a whole one, and one that is not finite.
        (0..rows.min(32) * cols).filter(|i| i % cols >= cols.saturating_sub(32)).for_each(|i| x[i] = 0.0);
        x[rows / 2 * cols] = f32::INFINITY;
        let [squares_down, squares_right] = [rows, cols].map(|len| len.div_ceil(32));
        let of = |r: usize, c: usize| r / 32 * squares_right + c / 32;
        let mut amaxes = vec![0.0f32; squares_down * squares_right];
        for (i, x) in x.iter().enumerate() {
            amaxes[of(i / cols, i % cols)] = amaxes[of(i / cols, i % cols)].max(x.abs());
        }
        let scale = |amax: &f32| reference::amax_to_scale(*amax, Format::E4m3, ScaleMode::E8m0(mode));
        let scales: Vec<_> = amaxes.iter().map(scale).collect();
        let code = |r: usize, c: usize| reference::encode(x[r * cols + c] * scales[of(r, c)].get(), Format::E4m3);
        let cast =
            Cast { format: Format::E4m3, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0Square(mode) };
        let [by_rows, by_cols] = quantize::<B>(tensor(x.clone(), dims), cast);
        let bits = |scales: Vec<InvScale>| scales.into_iter().map(|s| s.get().to_bits()).collect::<Vec<_>>();
        let want: Vec<u8> = (0..rows * cols).map(|i| code(i / cols, i % cols)).collect();
        assert!(by_rows.codes == want, "{what}: codes");
        let want: Vec<u8> = (0..rows * cols).map(|i| code(i % rows, i / rows)).collect();
        assert!(by_cols.codes == want, "{what}: transposed codes");
        let inverse = |r: usize, c: usize| scales[of(r, c)].inverse();
        let want = (0..rows).flat_map(|r| (0..squares_right).map(move |c| (r, 32 * c))).map(|(r, c)| inverse(r, c));
        assert_eq!(bits(by_rows.inv_scales), bits(want.collect()), "{what}: scales");
        let want = (0..cols).flat_map(|c| (0..squares_down).map(move |r| (32 * r, c))).map(|(r, c)| inverse(r, c));
        assert_eq!(bits(by_cols.inv_scales), bits(want.collect()), "{what}: transposed scales");
    }
}

#[test]
fn squares_are_cast_by_their_definition() {
    on_every_runtime!(squares_on);
}

#[test]
fn squares_need_weights_of_mx() {
    let refused = Float8LinearConfig::new(Recipe::Rowwise).with_mx_square_weights(true).validate().unwrap_err();
    assert!(refused.to_string().starts_with("mx_square_weights = true with recipe rowwise: "), "{refused}");
    Float8LinearConfig::new(Recipe::Mxfp8).with_mx_square_weights(true).validate().unwrap();
}
