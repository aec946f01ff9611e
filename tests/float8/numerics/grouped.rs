//! `grouped_linear` against its definition in f64, group by group; its report, high precision and
//! refused inputs.
use std::ops::Range;

use burn::backend::Autodiff;
use burn::module::{Module, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor};
use burn_float8::backend::Float8Backend;
use burn_float8::config::{CastConfig, Casts, Granularity, Operand};
use burn_float8::report::Gemm;
use burn_float8::{
    Float8Config, Float8LinearConfig, Float8State, GroupedLinear, Recipe, float8_autocast, grouped_linear, report,
};
use kernel_tests::{Element, Factor, products};
use test_data::{panic_of, transpose};

use crate::on_cpu_and_wgpu;
use crate::support::linear::A;
use crate::support::operand::{tensor, values};
use crate::support::oracle::{Exact, assert_within, factor};
use crate::support::runtime::Flex;
use crate::support::{normal, spread, verify};

/// Rows of each group; some rows are in no group.
const SIZES: [usize; 5] = [40, 0, 130, 1, 0];
const M: usize = 180;
const G: usize = SIZES.len();
const K: usize = 70;
const N: usize = 50;

/// End of each group of [`SIZES`].
fn ends() -> [i32; G] {
    [40, 40, 170, 171, 171]
}

/// x, w and dy.
fn inputs() -> [Vec<f32>; 3] {
    [normal(M * K, 1), normal(G * K * N, 2), normal(M * N, 3)]
}

fn int_ends<B: Backend>(ends: &[i32]) -> Tensor<B, 1, Int> {
    Tensor::from_ints(ends, &Default::default())
}

/// y, dx and dw. y and dx must have the dtype of x and dy, and dw the weight's.
fn ours<B: AutodiffBackend>(
    experts: &GroupedLinear<B>,
    [x, dy]: [&[f32]; 2],
    ends: &[i32],
    dtype: DType,
) -> [Vec<f32>; 3] {
    let (m, weight) = (x.len() / K, experts.weight.val());
    let load = |values: &[f32], cols| tensor::<B, 2>(values.to_vec(), [m, cols]).cast(dtype).detach();
    let x = load(x, K).require_grad();
    let y = experts.forward(x.clone(), int_ends::<B>(ends));
    let grads = (y.clone() * load(dy, N)).sum().backward();
    let (dx, dw) = (x.grad(&grads).unwrap(), weight.grad(&grads).unwrap());
    assert_eq!([y.dtype(), dx.dtype(), dw.dtype()], [dtype, dtype, weight.dtype()]);
    [values(y), values(dx), values(dw)]
}

/// Experts without a configuration.
fn plain<B: Backend>(w: &[f32], dtype: DType) -> GroupedLinear<B> {
    let weight = tensor::<B, 3>(w.to_vec(), [w.len() / (K * N), K, N]).cast(dtype).detach();
    GroupedLinear { weight: Param::initialized(ParamId::new(), weight.require_grad()) }
}

fn experts<B: Float8Backend>(config: &Float8LinearConfig, w: &[f32]) -> GroupedLinear<A<B>> {
    Float8Config::from(config.clone()).apply(plain(w, DType::F32)).unwrap().0
}

/// A grouped linear by definition: each operand is cast as the matrix that its GEMM contracts.
fn exact(config: &Float8LinearConfig, [x, w, dy]: [&[f32]; 3], sizes: &[usize]) -> [Exact; 3] {
    let (casts, groups, m) = (config.casts(), sizes.len(), x.len() / K);
    let span = |g: usize| {
        let start = sizes[..g].iter().sum();
        start..start + sizes[g]
    };
    let spans: Vec<_> = (0..groups).map(span).collect();
    // The transpose of each matrix of w, one below the other.
    let w_t: Vec<f32> = w.chunks(K * N).flat_map(|w| transpose(w, [K, N])).collect();
    // Groups begin at multiples of 128, with zeros between, and are transposed.
    let padded = |t: &[f32], cols: usize| {
        let (mut rows, mut at) = (vec![], vec![]);
        for span in &spans {
            at.push(rows.len() / cols);
            rows.extend_from_slice(&t[span.start * cols..span.end * cols]);
            rows.resize((rows.len() / cols).next_multiple_of(128) * cols, 0.0);
        }
        let len = rows.len() / cols;
        (transpose(&rows, [len, cols]), [cols, len], at)
    };
    let cast = |t: &[f32], shape, operand: Operand| factor(t, shape, casts[operand], config, None);
    // One scale for the tensor covers all its rows, including rows in no group.
    let cast_padded = |t: &[f32], cols, by_rows: Operand, by_cols: Operand| {
        let (first, second) = (casts[by_rows], casts[by_cols]);
        let is_one = first == second && first.scaling_granularity == Granularity::Tensor;
        let amax = is_one.then(|| t.iter().fold(0f32, |amax, x| amax.max(x.abs())));
        let (t, shape, at) = padded(t, cols);
        (factor(&t, shape, second, config, amax), at)
    };
    let (x_rows, wt_rows) = (cast(x, [m, K], Operand::INPUT), cast(&w_t, [groups * N, K], Operand::WEIGHT_T));
    let (dy_rows, w_rows) = (cast(dy, [m, N], Operand::GRAD_OUTPUT), cast(w, [groups * K, N], Operand::WEIGHT));
    let (x_cols, at) = cast_padded(x, K, Operand::INPUT, Operand::INPUT_T);
    let (dy_cols, _) = cast_padded(dy, N, Operand::GRAD_OUTPUT, Operand::GRAD_OUTPUT_T);
    let zeros = |len, k| Exact { elements: vec![Element { want: 0.0, size: 0.0 }; len], len: k };
    let (mut y, mut dx, mut dw) = (zeros(m * N, K), zeros(m * K, N), zeros(0, m));
    for (g, span) in spans.iter().enumerate() {
        let part = |factor: &Factor, rows: Range<usize>, cols| factor.part(rows, 0..cols);
        let product = products(&part(&x_rows, span.clone(), K), &part(&wt_rows, g * N..(g + 1) * N, K));
        y.elements[span.start * N..span.end * N].copy_from_slice(&product);
        let product = products(&part(&dy_rows, span.clone(), N), &part(&w_rows, g * K..(g + 1) * K, N));
        dx.elements[span.start * K..span.end * K].copy_from_slice(&product);
        let own = at[g]..at[g] + span.len();
        dw.elements.extend(products(&x_cols.part(0..K, own.clone()), &dy_cols.part(0..N, own)));
    }
    [y, dx, dw]
}

fn definition_on<B: Float8Backend>(runtime: &str) {
    let (mut x, w, mut dy) = (spread(M, K, 1), spread(G * K, N, 2), spread(M, N, 3));
    // The largest values are in rows of no group.
    let grouped: usize = SIZES.iter().sum();
    x[grouped * K..].iter_mut().chain(&mut dy[grouped * N..]).for_each(|x| *x *= 8.0);
    let cases: [(usize, [usize; G], [i32; G]); 4] = [
        (M, SIZES, ends()),
        // All rows in one of many groups; fewer rows than groups, with a row in no group.
        (33, [0, 0, 0, 33, 0], [0, 0, 0, 33, 33]),
        (3, [0, 1, 0, 0, 1], [0, 1, 1, 1, 2]),
        // Ends beyond the rows and ends below the previous one are clamped.
        (M, [40, 0, 140, 0, 0], [40, 30, 500, 10, 10]),
    ];
    for (recipe, (m, sizes, ends)) in Recipe::ALL.into_iter().flat_map(|recipe| cases.map(|case| (recipe, case))) {
        let config = Float8LinearConfig::new(recipe);
        let experts = experts::<B>(&config, &w);
        let (x, dy) = (&x[..m * K], &dy[..m * N]);
        let got = ours(&experts, [x, dy], &ends, DType::F32);
        assert_within(&format!("{runtime} {recipe} {ends:?}"), &got, &exact(&config, [x, &w, dy], &sizes), [0.0; 3]);
        let report = report(&experts);
        verify(report.clone()).unwrap();
        let layer = &report.layers[0];
        assert_eq!(layer.name, "linear", "{runtime}");
        for (gemm, calls) in layer.gemms() {
            let is_off = gemm == Gemm::Wgrad && config.casts()[Operand::INPUT_T].is_disabled();
            assert_eq!([calls.emulated, calls.high_precision], if is_off { [0, 1] } else { [1, 0] }, "{recipe} {gemm}");
        }
    }
}

#[test]
fn groups_equal_their_definition() {
    on_cpu_and_wgpu!(definition_on);
}

fn dtypes_on<B: Float8Backend>(runtime: &str) {
    let sizes = [20, 0, 45, 1];
    let (m, groups) = (70, sizes.len());
    for (dtype, unit) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        if !B::fp8_facts(&Default::default()).supports(dtype) {
            continue;
        }
        let round = |v: Vec<f32>| values(Tensor::<Flex, 1>::from_floats(&v[..], &Default::default()).cast(dtype));
        let (x, w, dy) = (round(normal(m * K, 1)), round(normal(groups * K * N, 2)), round(normal(m * N, 3)));
        let recipes = [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8];
        for (recipe, of_w) in recipes.into_iter().flat_map(|recipe| [(recipe, DType::F32), (recipe, dtype)]) {
            let config = Float8LinearConfig::new(recipe);
            let experts = Float8Config::from(config.clone()).apply(plain::<A<B>>(&w, of_w)).unwrap().0;
            let got = ours(&experts, [&x, &dy], &[20, 20, 65, 66], dtype);
            // Every result is rounded to the dtype, except an f32 dw from FP8.
            let rounds_dw = of_w != DType::F32 || config.casts()[Operand::INPUT_T].is_disabled();
            let units = [unit, unit, if rounds_dw { unit } else { 0.0 }];
            let what = format!("{runtime} {recipe} {dtype:?} by {of_w:?}");
            assert_within(&what, &got, &exact(&config, [&x, &w, &dy], &sizes), units);
            verify(report(&experts)).unwrap();
        }
    }
}

/// x in bf16 or f16, w in the same dtype or f32. As in a linear, y and dx have x's dtype, and dw
/// has w's.
#[test]
fn dtypes_may_differ() {
    on_cpu_and_wgpu!(dtypes_on);
}

fn forward(experts: &GroupedLinear<A<Flex>>) -> Tensor<A<Flex>, 2> {
    experts.forward(tensor::<A<Flex>, 2>(normal(M * K, 1), [M, K]).require_grad(), int_ends(&ends()))
}

/// Backward has the precision of its forward.
#[test]
fn a_forward_in_high_precision_has_such_a_backward() {
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Tensorwise), &normal(G * K * N, 2));
    let calls = || report(&experts).layers[0].gemms().map(|(_, gemm)| [gemm.emulated, gemm.high_precision]);
    float8_autocast(false, || forward(&experts)).sum().backward();
    assert_eq!(calls(), [[0, 1]; 3]);
    let y = forward(&experts);
    float8_autocast(false, || y.sum().backward());
    assert_eq!(calls(), [[1, 1]; 3]);
}

/// Backward passes through frozen ones, so their x and dy have a history.
#[test]
fn frozen_grouped_linears_learn_their_histories() {
    let frozen = experts::<Flex>(&Float8LinearConfig::new(Recipe::Delayed), &normal(G * K * N, 2)).no_grad();
    forward(&frozen).powf_scalar(2.0).sum().backward();
    let calls = report(&frozen).layers[0].gemms().map(|(_, gemm)| gemm.emulated);
    assert_eq!(calls, [1, 1, 0]);
    let state = &Float8State::export(&frozen).layers["linear"];
    assert!(state.input.is_some() && state.grad_output.is_some(), "{state:?}");
}

/// On a plain backend they are matmuls of the groups. f64 has no FP8 cast: the GEMMs run in high
/// precision, and the report gives the reason.
#[test]
fn without_casts_they_run_in_high_precision() {
    let [x, w, dy] = inputs();
    let off = CastConfig::disabled();
    let off = Float8LinearConfig::new(Recipe::Tensorwise).with_casts(Casts::new(off, off, off));
    let want = exact(&off, [&x, &w, &dy], &SIZES);
    let plain = ours(&plain::<Autodiff<Flex>>(&w, DType::F32), [&x, &dy], &ends(), DType::F32);
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Tensorwise), &w);
    let in_f64 = ours(&experts, [&x, &dy], &ends(), DType::F64);
    [plain, in_f64].iter().for_each(|got| assert_within("high precision", got, &want, [0.0; 3]));
    for (gemm, calls) in report(&experts).layers[0].gemms() {
        let got = (calls.emulated, calls.high_precision, calls.reason.as_deref());
        assert_eq!(got, (0, 1, Some("dtype F64")), "{gemm}");
    }
}

/// A weight is cast once for each direction, over all accumulated micro-batches. Rows between the
/// groups of wgrad's operands count as padding.
#[test]
fn casts_and_padding_are_counted() {
    let [x, w, dy] = inputs();
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Mxfp8), &w);
    let run = || ours(&experts, [&x, &dy], &ends(), DType::F32);
    assert_eq!(run(), run());
    let layer = &report(&experts).layers[0];
    // x by rows and padded, w in both directions, dy by rows and padded.
    assert_eq!(layer.casts, [4, 2, 4]);
    // 180 rows in five groups take up to 180 + 5 · 127, in whole blocks of 128: 768.
    assert_eq!(layer.gemms().map(|(_, gemm)| gemm.padding().unwrap()), [0.0, 0.0, 768.0 / 180.0 - 1.0]);
}

/// Nothing to multiply: all results are zero.
fn no_rows_on<B: Float8Backend>(runtime: &str) {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp, Recipe::Mxfp8] {
        let experts = experts::<B>(&Float8LinearConfig::new(recipe), &normal(G * K * N, 2));
        let x = Tensor::<A<B>, 2>::zeros([0, K], &Default::default()).require_grad();
        let y = experts.forward(x.clone(), int_ends(&[0; G]));
        let grads = y.clone().sum().backward();
        assert_eq!(y.dims(), [0, N], "{runtime} {recipe}");
        // Not every backend gives an empty gradient for a sum of no rows.
        assert!(runtime != "flex" || x.grad(&grads).unwrap().dims() == [0, K], "{recipe}");
        assert_eq!(values(experts.weight.grad(&grads).unwrap()), vec![0.0; G * K * N], "{runtime} {recipe}");
        // All rows are outside the groups.
        let results = ours(&experts, [&vec![1.0; 3 * K], &vec![1.0; 3 * N]], &[0; G], DType::F32);
        assert!(results.concat().iter().all(|&x| x == 0.0), "{runtime} {recipe}");
    }
}

#[test]
fn no_rows() {
    on_cpu_and_wgpu!(no_rows_on);
}

/// Two layers of experts.
#[derive(Module, Debug)]
struct Pair<B: Backend> {
    first: GroupedLinear<B>,
    second: GroupedLinear<B>,
}

/// Histories observe x and dy once a micro-batch, although two copies of each are cast, and a
/// weight once a step. An x shared by two layers belongs to the first.
#[test]
fn delayed_scaling_observes_each_tensor_once() {
    let device = Default::default();
    let new = || GroupedLinear::<A<Flex>>::new(3, 32, 16, &Initializer::Normal { mean: 0.0, std: 1.0 }, &device);
    let pair = Pair { first: new(), second: new() };
    let pair = Float8Config::new(Recipe::Delayed).apply(pair).unwrap().0;
    for seed in [1, 2] {
        let x = tensor::<A<Flex>, 2>(normal(5 * 32, seed), [5, 32]).require_grad();
        let ends = int_ends(&[1, 3, 5]);
        (pair.first.forward(x.clone(), ends.clone()) * pair.second.forward(x, ends)).sum().backward();
    }
    let state = Float8State::export(&pair);
    let observed = ["first", "second"].map(|name| {
        let layer = &state.layers[name];
        [&layer.input, &layer.weight, &layer.grad_output].map(|amax| amax.as_ref().map(|amax| amax.observed.len()))
    });
    // One observed amax: the largest of both micro-batches.
    assert_eq!(observed, [[Some(1); 3], [None, Some(1), Some(1)]]);
    let largest = [1, 2].into_iter().flat_map(|seed| normal(5 * 32, seed)).fold(0f32, |max, x| max.max(x.abs()));
    let input = state.layers["first"].input.as_ref().expect("observed");
    assert_eq!(input.observed, [largest.to_bits()]);
}

/// A model's experts have a name, a recipe by name, and an entry in the summary.
#[test]
fn experts_are_layers() {
    let device = Default::default();
    let new = |k, n| GroupedLinear::<A<Flex>>::new(3, k, n, &Initializer::Zeros, &device);
    let experts = Pair { first: new(32, 64), second: new(64, 32) };
    let config = Float8Config::new(Recipe::Rowwise).with_filter_fqns(["second"]);
    let (experts, summary) = config.apply(experts).unwrap();
    assert_eq!(summary.converted, ["first"]);
    assert_eq!(summary.skipped.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["second"]);
    let x = Tensor::<A<Flex>, 2>::ones([5, 32], &device);
    let ends = int_ends(&[1, 3, 5]);
    experts.second.forward(experts.first.forward(x, ends.clone()), ends).sum().backward();
    let calls = report(&experts).layers.into_iter().map(|l| l.gemms().map(|(_, g)| [g.emulated, g.high_precision]));
    // x needs no gradient.
    assert_eq!(calls.collect::<Vec<_>>(), [[[1, 0], [0, 0], [1, 0]], [[0, 1], [0, 1], [0, 1]]]);
}

#[test]
fn shapes_that_do_not_fit() {
    let device = Default::default();
    let zeros = |shape| Tensor::<A<Flex>, 3>::zeros(shape, &device);
    let x = Tensor::<A<Flex>, 2>::zeros([4, 8], &device);
    for (weight, ends) in [([2, 7, 3], vec![2, 4]), ([3, 8, 3], vec![2, 4]), ([0, 8, 3], vec![])] {
        let message = panic_of(|| drop(grouped_linear(x.clone(), zeros(weight), int_ends(&ends))));
        let want = format!("a grouped linear of x [4, 8], weight {weight:?} and {} ends: ", ends.len());
        assert!(message.starts_with(&want), "{message}");
    }
}
