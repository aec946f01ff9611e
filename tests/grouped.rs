//! `grouped_linear` against its definition in f64, group by group; its report, its high precision, and what it refuses.
use burn::backend::Autodiff;
use burn::module::{Module, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{
    Float8, Float8Backend, Float8Config, Float8Error, Float8LinearConfig, Float8Ops, Gemm, GroupedLinear, Recipe, Role,
    grouped_linear, report,
};

use crate::on_every_runtime;
use crate::support::operand::{tensor, values};
use crate::support::oracle::{dequantized, matmul};
use crate::support::runtime::Flex;
use crate::support::{max_error, normal, spread, verify};

type A<B> = Autodiff<Float8<B>>;

/// Rows of each group; some rows belong to none.
const SIZES: [usize; 5] = [40, 0, 130, 1, 0];
const M: usize = 180;
const G: usize = SIZES.len();
const K: usize = 70;
const N: usize = 50;

fn ends() -> Vec<usize> {
    SIZES
        .iter()
        .scan(0, |end, size| {
            Some({
                *end += size;
                *end
            })
        })
        .collect()
}

fn int_ends<B: Float8Backend>(ends: &[usize]) -> Tensor<A<B>, 1, Int> {
    let ends: Vec<i32> = ends.iter().map(|&end| end as i32).collect();
    let count = ends.len();
    Tensor::from_data(TensorData::new(ends, [count]), &Default::default())
}

/// y, dx and dw.
fn ours<B: Float8Backend>(experts: &GroupedLinear<A<B>>, [x, dy]: [&[f32]; 2], ends: &[usize]) -> [Vec<f32>; 3] {
    let m = x.len() / K;
    let x = tensor::<A<B>, 2>(x.to_vec(), [m, K]).require_grad();
    let y = experts.forward(x.clone(), int_ends::<B>(ends));
    let grads = (y.clone() * tensor(dy.to_vec(), [m, N])).sum().backward();
    [values(y), values(x.grad(&grads).unwrap()), values(experts.weight.grad(&grads).unwrap())]
}

fn experts<B: Float8Backend>(config: &Float8LinearConfig, w: &[f32]) -> GroupedLinear<A<B>> {
    let weight = tensor::<A<B>, 3>(w.to_vec(), [G, K, N]).require_grad();
    let experts = GroupedLinear { weight: Param::initialized(ParamId::new(), weight) };
    Float8Config::from(config.clone()).convert(experts).unwrap().0
}

/// The same by the definition: each operand is cast as the matrix that the GEMM contracts.
fn exact(config: &Float8LinearConfig, [x, w, dy]: [&[f32]; 3]) -> [Vec<f32>; 3] {
    let casts = config.casts();
    let spans: Vec<_> = ends().iter().zip(SIZES).map(|(end, size)| end - size..*end).collect();
    let transposed: Vec<f32> =
        (0..G).flat_map(|g| (0..N).flat_map(move |n| (0..K).map(move |k| w[(g * K + k) * N + n]))).collect();
    // Groups begin at multiples of 128, zeros between.
    let padded = |t: &[f32], cols: usize| {
        let (mut rows, mut at) = (vec![], vec![]);
        for span in &spans {
            at.push(rows.len() / cols);
            rows.extend_from_slice(&t[span.start * cols..span.end * cols]);
            rows.resize((rows.len() / cols).next_multiple_of(128) * cols, 0.0);
        }
        (rows, at)
    };
    let cast = |t: &[f32], shape, cast, by_cols| dequantized(t, shape, cast, config, by_cols, None);
    let (x_rows, w_cols) = (cast(x, [M, K], casts.input, false), cast(&transposed, [G * N, K], casts.weight, false));
    let dy_rows = cast(dy, [M, N], casts.grad_output, false);
    let w_rows = cast(w, [G * K, N], casts.weight_for_grad_input, false);
    let ((xp, at), (dyp, _)) = (padded(x, K), padded(dy, N));
    let p = xp.len() / K;
    let x_cols = cast(&xp, [p, K], casts.input_for_grad_weight, true);
    let dy_cols = cast(&dyp, [p, N], casts.grad_output_for_grad_weight, true);
    let (mut y, mut dx, mut dw) = (vec![0.0; M * N], vec![0.0; M * K], vec![]);
    for (g, span) in spans.iter().enumerate() {
        let m = span.len();
        let product = matmul(&x_rows[span.start * K..], [K, 1], &w_cols[g * N * K..], [1, K], [m, K, N]);
        y[span.start * N..span.end * N].copy_from_slice(&product);
        let product = matmul(&dy_rows[span.start * N..], [N, 1], &w_rows[g * K * N..], [1, N], [m, N, K]);
        dx[span.start * K..span.end * K].copy_from_slice(&product);
        dw.extend(matmul(&x_cols[at[g] * K..], [1, K], &dy_cols[at[g] * N..], [N, 1], [K, m, N]));
    }
    [y, dx, dw]
}

fn definition_on<B: Float8Backend>(runtime: &str) {
    let (x, w, dy) = (spread(M, K, 1), spread(G * K, N, 2), spread(M, N, 3));
    for recipe in Recipe::ALL {
        let config = Float8LinearConfig::new(recipe);
        let experts = experts::<B>(&config, &w);
        let got = ours(&experts, [&x, &dy], &ends());
        for ((what, got), exact) in ["y", "dx", "dw"].iter().zip(&got).zip(exact(&config, [&x, &w, &dy])) {
            let largest = exact.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = max_error(got, &exact) / f64::from(largest);
            assert!(error < 2e-6, "{runtime} {recipe} {what}: {error:e} of the largest");
        }
        let report = report(&experts);
        verify(report.clone()).unwrap();
        let layer = &report.layers[0];
        assert_eq!(layer.name, "linear", "{runtime}");
        for (gemm, calls) in layer.gemms() {
            let is_off = gemm == Gemm::Wgrad && config.casts().input_for_grad_weight.is_disabled();
            assert_eq!([calls.emulated, calls.high_precision], if is_off { [0, 1] } else { [1, 0] }, "{recipe} {gemm}");
        }
    }
}

#[test]
fn groups_equal_their_definition() {
    on_every_runtime!(definition_on);
}

/// Accumulated micro-batches cast a weight once for each direction.
#[test]
fn weights_are_cast_once_a_step() {
    let (x, w, dy) = (normal(M * K, 1), normal(G * K * N, 2), normal(M * N, 3));
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Mxfp8), &w);
    let first = ours(&experts, [&x, &dy], &ends());
    assert_eq!(ours(&experts, [&x, &dy], &ends()), first);
    let layer = A::<Flex>::layer(&experts.weight.val().into_primitive().tensor()).unwrap();
    // x by rows and padded, w in both directions, dy by rows and padded.
    assert_eq!(Role::ALL.map(|role| layer.casts(role)), [4, 2, 4]);
}

fn clamped_on<B: Float8Backend>(runtime: &str) {
    let (x, w, dy) = (normal(M * K, 1), normal(G * K * N, 2), normal(M * N, 3));
    for recipe in [Recipe::Mxfp8, Recipe::RowwiseWithGwHp] {
        let experts = experts::<B>(&Float8LinearConfig::new(recipe), &w);
        let want = ours(&experts, [&x, &dy], &[40, 40, M, M, M]);
        assert_eq!(ours(&experts, [&x, &dy], &[40, 30, 500, 10, 10]), want, "{runtime} {recipe}");
    }
}

/// Ends beyond the rows, and below their predecessors, are taken for those: in y, in dx and in dw.
#[test]
fn ends_that_cannot_be() {
    on_every_runtime!(clamped_on);
}

/// What stands between the groups of wgrad's operands counts as padding.
#[test]
fn padding_is_reported() {
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Mxfp8), &normal(G * K * N, 2));
    ours(&experts, [&normal(M * K, 1), &normal(M * N, 3)], &ends());
    let padding = report(&experts).layers[0].gemms().map(|(_, gemm)| gemm.padding().unwrap());
    // 180 rows in five groups take up to 180 + 5 · 127, in blocks of 128: 896.
    assert_eq!(padding[2], 896.0 / 180.0 - 1.0);
    assert_eq!(padding[..2], [0.0; 2]);
}

/// Nothing to multiply: zeros, and no GEMM but in words.
#[test]
fn no_rows() {
    let experts = experts::<Flex>(&Float8LinearConfig::new(Recipe::Mxfp8), &normal(G * K * N, 2));
    let [y, dx, dw] = ours(&experts, [&[], &[]], &[0; G]);
    assert_eq!((y.len(), dx.len(), dw.len()), (0, 0, G * K * N));
    assert!(dw.iter().all(|&x| x == 0.0));
    // All rows outside the groups.
    let [y, dx, dw] = ours(&experts, [&vec![1.0; 3 * K], &vec![1.0; 3 * N]], &[0; G]);
    assert!(y.iter().chain(&dx).chain(&dw).all(|&x| x == 0.0));
}

/// A model's experts have a name, a recipe by it, and a place in the summary.
#[test]
fn experts_are_layers() {
    #[derive(Module, Debug)]
    struct Experts<B: burn::tensor::backend::Backend> {
        up: GroupedLinear<B>,
        down: GroupedLinear<B>,
    }
    let device = Default::default();
    let new = |k, n| GroupedLinear::<A<Flex>>::new(3, k, n, &Initializer::Zeros, &device);
    let experts = Experts { up: new(32, 64), down: new(64, 32) };
    let config = Float8Config::new(Recipe::Rowwise).with_filter_fqns(["down"]);
    let (experts, summary) = config.convert(experts).unwrap();
    assert_eq!(summary.converted, ["up"]);
    assert_eq!(summary.skipped.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["down"]);
    let x = Tensor::<A<Flex>, 2>::ones([5, 32], &device);
    let ends = int_ends::<Flex>(&[1, 3, 5]);
    experts.down.forward(experts.up.forward(x, ends.clone()), ends).sum().backward();
    let calls = report(&experts).layers.into_iter().map(|l| l.gemms().map(|(_, g)| [g.emulated, g.high_precision]));
    // x wants no gradient.
    assert_eq!(calls.collect::<Vec<_>>(), [[[1, 0], [0, 0], [1, 0]], [[0, 1], [0, 1], [0, 1]]]);
}

#[test]
fn shapes_that_do_not_fit() {
    let device = Default::default();
    let zeros = |shape| Tensor::<A<Flex>, 3>::zeros(shape, &device);
    let x = Tensor::<A<Flex>, 2>::zeros([4, 8], &device);
    for (weight, ends) in [([2, 7, 3], vec![2, 4]), ([3, 8, 3], vec![2, 4]), ([0, 8, 3], vec![])] {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            grouped_linear(x.clone(), zeros(weight), int_ends::<Flex>(&ends))
        }));
        let message = panic.unwrap_err().downcast_ref::<String>().cloned().unwrap_or_default();
        let want = Float8Error::GroupedShapes { x: [4, 8], weight, ends: ends.len() };
        assert_eq!(message, want.to_string());
    }
}
