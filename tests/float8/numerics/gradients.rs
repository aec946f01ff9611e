//! y, dx, dw and db against the definition in f64: every recipe and setting of casts, any M, K and
//! N, any rank and any strides.
use burn::backend::Autodiff;
use burn::nn::Linear;
use burn::tensor::{Tensor, s};
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Recipe,
    backend::Float8Backend,
    config::{CastConfig, Casts, Format, Granularity, Operand, ScaleCalculationMode},
    report::Gemm,
};
use test_data::transpose;

use crate::support::linear::{forward_backward, from_values, layer};
use crate::support::operand::{tensor, values};
use crate::support::oracle::{self, Exact, assert_within};
use crate::support::{normal, relative_error, spread};
use crate::{on_cpu_and_wgpu, on_every_runtime};

type A<B> = Float8<Autodiff<B>>;

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
    for casts in [mixed, hp_fprop] {
        configs.push(Float8LinearConfig::new(Recipe::Tensorwise).with_casts(casts));
    }
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
        let values @ [x, w, b, dy] = &[spread(m, k, 1), spread(k, n, 2), normal(n, 3), spread(m, n, 4)];
        let exact = oracle::linear([x, w, dy], [m, k, n], Some(b), &config, [None; 3]);
        Self { config, shape, values: values.clone(), exact }
    }

    fn has_mixed_casts(&self) -> bool {
        self.config.casts() != self.config.recipe().casts() && self.config.recipe() == Recipe::Tensorwise
    }
}

fn cases_on<B: Float8Backend>(runtime: &str, cases: &[Case]) {
    // Settings are the same on every runtime, but a device compiles kernels for each.
    let is_default = |case: &&Case| case.config == Float8LinearConfig::new(case.config.recipe());
    let casts = |case: &&Case| runtime == "flex" || is_default(case) || case.has_mixed_casts();
    for Case { config, shape: shape @ [batch, tokens, k, n], values: [x, w, b, dy], exact } in
        cases.iter().filter(casts)
    {
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

/// The recipes that read x, w and dy in different ways.
const LAYOUTS: [Recipe; 4] = [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Blockwise, Recipe::Mxfp8];

/// Leading axes out of order, so there is no single row stride: `[2, 3, 4, c]` as a view of
/// `[3, 2, 4, c]`.
fn permuted<B: Float8Backend>(v: &[f32], c: usize) -> Tensor<A<B>, 4> {
    let block = 4 * c;
    let order = (0..3).flat_map(|j| (0..2).map(move |i| i * 3 + j));
    tensor(order.flat_map(|b| v[b * block..][..block].to_vec()).collect(), [3, 2, 4, c]).swap_dims(0, 1)
}

fn transposed<B: Float8Backend>(v: &[f32], [r, c]: [usize; 2]) -> Tensor<A<B>, 2> {
    tensor(transpose(v, [r, c]), [c, r]).transpose()
}

fn sliced<B: Float8Backend>(v: &[f32], [r, c]: [usize; 2]) -> Tensor<A<B>, 2> {
    let mut wide = normal((r + 2) * (c + 3), 5);
    (0..r).for_each(|i| wide[(i + 1) * (c + 3) + 2..][..c].copy_from_slice(&v[i * c..][..c]));
    tensor(wide, [r + 2, c + 3]).slice(s![1..r + 1, 2..c + 2])
}

fn views_on<B: Float8Backend>(runtime: &str) {
    let [m, k, n] = [24, 10, 6];
    let (xs, ws, bs, dys) = (&normal(m * k, 1), &normal(k * n, 2), &normal(n, 3), &normal(m * n, 4));
    for recipe in LAYOUTS {
        let config = Float8Config::new(recipe);
        let with = |w| layer::<B>(&config, w, Some(tensor(bs.clone(), [n])));
        let dense = || with(tensor(ws.clone(), [k, n]));
        let same = |what: &str, m: usize, ours: Vec<Vec<f32>>| {
            let plain = from_values::<B>(&config, [&xs[..m * k], ws, &dys[..m * n]], [m, k, n], Some(bs));
            for (ours, plain) in ours.iter().zip(&plain) {
                assert!(relative_error(ours, plain) < 1e-6, "{runtime} {recipe} {what}");
            }
        };
        let [x, w, dy] = [(xs, [m, k]), (ws, [k, n]), (dys, [m, n])].map(|(v, shape)| transposed::<B>(v, shape));
        same("transposed", m, forward_backward(&with(w), x, dy));
        let [x, w, dy] = [(xs, [m, k]), (ws, [k, n]), (dys, [m, n])].map(|(v, shape)| sliced::<B>(v, shape));
        same("sliced", m, forward_backward(&with(w), x, dy));
        let r4 = |v: &[f32], c| tensor::<A<B>, 4>(v.to_vec(), [2, 3, 4, c]);
        same("rank 4", m, forward_backward(&dense(), r4(xs, k), r4(dys, n)));
        same("permuted", m, forward_backward(&dense(), permuted::<B>(xs, k), permuted::<B>(dys, n)));
        let r1 = |v: &[f32], c: usize| tensor::<A<B>, 1>(v[..c].to_vec(), [c]);
        same("rank 1", 1, forward_backward(&dense(), r1(xs, k), r1(dys, n)));
        empty_batch(&dense(), runtime);
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
