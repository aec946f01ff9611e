//! y, dx, dw and db against torchao's and the definition in f64: every recipe and setting of casts,
//! any M, K and N, any rank and any strides.
use burn::nn::Linear;
use burn::tensor::{Tensor, s};
use burn_float8::backend::Float8Backend;
use burn_float8::config::{CastConfig, Casts, Format, Granularity, Operand, ScaleCalculationMode};
use burn_float8::report::Gemm;
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};
use kernel_tests::visit_golden_linears;
use test_data::Golden;

use crate::support::linear::{A, forward_backward, from_values, layer};
use crate::support::operand::{tensor, values};
use crate::support::oracle::{self, Exact, assert_within};
use crate::support::{normal, relative_error, spread};
use crate::{on_cpu_and_wgpu, on_every_runtime};

/// Every recipe, and casts that no recipe has.
fn configs() -> Vec<Float8LinearConfig> {
    let mut configs: Vec<_> = Recipe::ALL.map(Float8LinearConfig::new).into();
    configs.extend(Recipe::ALL.map(|recipe| {
        let config = Float8LinearConfig::new(recipe);
        config.with_round_scales_to_power_of_2(!recipe.round_scales_to_power_of_2())
    }));
    let cast = CastConfig::dynamic;
    let mixed = Casts::new(
        cast(Granularity::Row, Format::E5m2),
        cast(Granularity::Row, Format::E4m3),
        cast(Granularity::Tensor, Format::E5m2),
    )
    .with(Operand::INPUT_T, cast(Granularity::Block1x128, Format::E5m2))
    .with(Operand::WEIGHT_T, cast(Granularity::Block128x128, Format::E4m3))
    .with(Operand::GRAD_OUTPUT_T, cast(Granularity::Block128x128, Format::E5m2));
    // E8M0 scales with each other granularity, on either side.
    let mixed_mx = Casts::new(
        cast(Granularity::Block1x32, Format::E5m2),
        cast(Granularity::Block1x32, Format::E4m3),
        cast(Granularity::Row, Format::E4m3),
    )
    .with(Operand::WEIGHT_T, cast(Granularity::Block128x128, Format::E4m3))
    .with(Operand::GRAD_OUTPUT_T, cast(Granularity::Tensor, Format::E4m3));
    for mode in ScaleCalculationMode::ALL {
        let config = Float8LinearConfig::new(Recipe::Mxfp8).with_scale_calculation_mode(mode);
        configs.extend([config.clone(), config.with_casts(mixed_mx)]);
    }
    let hp_fprop = Recipe::Blockwise.casts().without(Gemm::Fprop);
    let of = |casts| Float8LinearConfig::new(Recipe::Tensorwise).with_casts(casts);
    configs.extend([mixed, hp_fprop].map(of));
    configs
}

/// A linear with a bias, and its results by definition.
struct Case {
    config: Float8LinearConfig,
    /// Batch size, tokens, K and N.
    shape: [usize; 4],
    /// x, w, b and dy.
    values: [Vec<f32>; 4],
    exact: Vec<Exact>,
}

impl Case {
    fn new(config: Float8LinearConfig, shape @ [batch, tokens, k, n]: [usize; 4]) -> Self {
        let m = batch * tokens;
        let [x, w, b, dy] = [spread(m, k, 1), spread(k, n, 2), normal(n, 3), spread(m, n, 4)];
        let exact = oracle::linear([&x, &w, &dy], [m, k, n], Some(&b), &config, [None; 3]);
        Self { config, shape, values: [x, w, b, dy], exact }
    }
}

fn cases_on<B: Float8Backend>(runtime: &str, cases: &[Case]) {
    for Case { config, shape: shape @ [batch, tokens, k, n], values: [x, w, b, dy], exact } in cases {
        // Settings are the same on every runtime, but a device compiles kernels for each.
        let recipe = config.recipe();
        let is_mixed = recipe == Recipe::Tensorwise && config.casts() != recipe.casts();
        if runtime != "flex" && !is_mixed && *config != Float8LinearConfig::new(recipe) {
            continue;
        }
        let (w, b) = (tensor::<A<B>, 2>(w.clone(), [*k, *n]), tensor(b.clone(), [*n]));
        let layer = layer::<B>(&config.clone().into(), w, Some(b));
        let load = |values: &[f32], cols| tensor::<A<B>, 3>(values.to_vec(), [*batch, *tokens, cols]);
        let got = forward_backward::<B, 3>(&layer, load(x, *k), load(dy, *n));
        assert_within(&format!("{runtime} {config} {shape:?}"), &got, exact, [0.0; 3]);
    }
}

#[test]
fn gradients_equal_their_definition() {
    // More than one block of 128 along every axis; no size is a multiple.
    let cases: Vec<_> = configs().into_iter().map(|config| Case::new(config, [3, 47, 133, 150])).collect();
    on_every_runtime!(cases_on, &cases);
}

#[test]
fn ragged_shapes_equal_their_definition() {
    let shapes = [[1, 1, 1], [1, 5, 3], [3, 1, 2], [2, 3, 1], [17, 33, 65], [64, 64, 64], [5, 300, 7], [257, 15, 129]];
    let shapes = shapes.into_iter().flat_map(|[m, k, n]| LAYOUTS.map(|recipe| (recipe, [1, m, k, n])));
    let cases: Vec<_> = shapes.map(|(recipe, shape)| Case::new(Float8LinearConfig::new(recipe), shape)).collect();
    on_cpu_and_wgpu!(cases_on, &cases);
}

/// y, dx and dw of linear.safetensors.
fn golden_on<B: Float8Backend>(runtime: &str, golden: &Golden) {
    let mut count = 0;
    visit_golden_linears::<B>(golden, &mut |case| {
        let name = case.name.clone();
        case.run().unwrap_or_else(|failure| panic!("{name} on {runtime}: {failure}"));
        count += 1;
    });
    assert!(count >= 3, "{count} recipes on {runtime}");
}

#[test]
fn golden_linear_on_every_runtime() {
    on_cpu_and_wgpu!(golden_on, &Golden::open("linear.safetensors"));
}

/// The recipes that read x, w and dy in different ways.
const LAYOUTS: [Recipe; 4] = [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Blockwise, Recipe::Mxfp8];

/// The same tensor in memory in which two axes are swapped.
fn swapped<B: Float8Backend, const D: usize>(t: Tensor<A<B>, D>, [a, b]: [usize; 2]) -> Tensor<A<B>, D> {
    Tensor::from_data(t.swap_dims(a, b).into_data(), &Default::default()).swap_dims(a, b)
}

/// The same matrix as a part of a larger one.
fn sliced<B: Float8Backend>(t: Tensor<A<B>, 2>) -> Tensor<A<B>, 2> {
    let [r, c] = t.dims();
    let area = s![1..r + 1, 2..c + 2];
    tensor(normal((r + 2) * (c + 3), 5), [r + 2, c + 3]).slice_assign(area, t).slice(area)
}

fn views_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [24, 10, 6];
    let (xs, ws, bs, dys) = (&normal(m * k, 1), &normal(k * n, 2), &normal(n, 3), &normal(m * n, 4));
    for recipe in LAYOUTS {
        let config = Float8Config::new(recipe);
        let with = |w| layer::<B>(&config, w, Some(tensor(bs.clone(), [n])));
        let same = |what: &str, m: usize, ours: Vec<Vec<f32>>| {
            let plain = from_values::<B>(&config, [&xs[..m * k], ws, &dys[..m * n]], [m, k, n], Some(bs));
            for (ours, plain) in ours.iter().zip(&plain) {
                assert!(relative_error(ours, plain) < 1e-6, "{runtime} {recipe} {what}");
            }
        };
        let [x, w, dy]: [Tensor<A<B>, 2>; 3] =
            [(xs, [m, k]), (ws, [k, n]), (dys, [m, n])].map(|(v, shape)| tensor(v.clone(), shape));
        let [tx, tw, tdy] = [&x, &w, &dy].map(|t| swapped(t.clone(), [0, 1]));
        same("transposed", m, forward_backward(&with(tw), tx, tdy));
        let [sx, sw, sdy] = [&x, &w, &dy].map(|t| sliced(t.clone()));
        same("sliced", m, forward_backward(&with(sw), sx, sdy));
        let dense = with(w);
        let [x4, dy4] = [(&x, k), (&dy, n)].map(|(t, cols)| t.clone().reshape([2, 3, 4, cols]));
        same("rank 4", m, forward_backward(&dense, x4.clone(), dy4.clone()));
        // Leading axes out of order have no single row stride.
        same("permuted", m, forward_backward(&dense, swapped(x4, [0, 1]), swapped(dy4, [0, 1])));
        let [x1, dy1] = [x, dy].map(|t| t.slice_dim(0, 0..1).squeeze_dim::<1>(0));
        same("rank 1", 1, forward_backward(&dense, x1, dy1));
        empty_batch(&dense, runtime);
    }
}

#[test]
fn strides_ranks_and_empty_batches() {
    on_every_runtime!(views_on);
}

/// No rows: empty results, and zero gradients for the parameters.
fn empty_batch<B: Float8Backend>(layer: &Linear<A<B>>, runtime: &str) {
    let [k, n] = layer.weight.dims();
    let x = Tensor::<A<B>, 2>::zeros([0, k], &Default::default()).require_grad();
    let y = layer.forward(x.clone());
    assert_eq!(y.dims(), [0, n], "{runtime} empty batch");
    // Not every backend sums an empty tensor to a loss.
    let grads = y.backward();
    assert_eq!(x.grad(&grads).expect("tracked").dims(), [0, k], "{runtime} empty batch");
    assert_eq!(values(layer.weight.grad(&grads).expect("tracked")), vec![0.0; k * n], "{runtime} empty batch");
    let bias = layer.bias.as_ref().expect("it has one");
    assert_eq!(values(bias.grad(&grads).expect("tracked")), vec![0.0; n], "{runtime} empty batch");
}
