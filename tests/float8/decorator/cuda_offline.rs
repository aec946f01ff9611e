//! `Float8` over CUDA offline: Burn's CUDA backend on a runtime that generates every kernel for an
//! absent H200.
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_float8::config::{CastConfig, Format, Granularity, Operand, SelfCheck};
use burn_float8::nn::{attention, rms_norm, swiglu};
use burn_float8::{
    Float8Config, Float8LinearConfig, GroupedLinear, Recipe, begin_float8_step, float8_autocast, report,
};
use burn_fusion::Fusion;
use codegen::device::{GenerateCuda, Generated, OfflineDevice, idle, take, take_allocations, take_waits};
use cubecl::Runtime;

use crate::support::linear::{A, layer};
use crate::support::normal;
use crate::support::operand::tensor;
use crate::support::process::alone;

/// `burn::backend::Cuda` on another runtime.
type Offline = Fusion<CubeBackend<GenerateCuda, f32, i32, u8>>;
type B = A<Offline>;

const SHAPE: [usize; 3] = [128, 256, 192];

/// Runs one test at a time, since the runtime's records are global to the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sync() {
    B::sync(&OfflineDevice::default()).expect("nothing runs");
}

/// Launches of some work.
struct Launched {
    names: Vec<String>,
    /// Launches of float8-kernels.
    own: usize,
    /// Launches of float8-kernels before which the host copies something to the device.
    uploads: usize,
    /// The same for Burn's kernels.
    burn_uploads: usize,
    /// Memory allocations.
    allocations: usize,
}

impl Launched {
    /// Launches of `work` up to the final sync, before which the host must not wait. The result of
    /// `work` is kept until then.
    fn by<K>(work: impl FnOnce() -> K) -> (K, Self) {
        const OWN: &str = "cast_ partial_maxima line_maxima fold_ gemm_ dequantize swiglu rms_norm rotate sum_rows \
                           attention_ classify stats_of_rows";
        sync();
        // Earlier records do not count.
        let _before = (take(), take_waits(), take_allocations());
        let kept = work();
        assert_eq!(take_waits(), 0, "the host waited for the device");
        sync();
        let (own, burns): (Vec<_>, Vec<_>) =
            take().into_iter().partition(|kernel| OWN.split(' ').any(|own| kernel.name.starts_with(own)));
        let uploads = |kernels: &[Generated]| kernels.iter().filter(|kernel| kernel.copies_shapes).count();
        let launched = Self {
            own: own.len(),
            uploads: uploads(&own),
            burn_uploads: uploads(&burns),
            allocations: take_allocations(),
            names: own.into_iter().chain(burns).map(|kernel| kernel.name).collect(),
        };
        (kept, launched)
    }

    fn count(&self, part: &str) -> usize {
        self.names.iter().filter(|name| name.contains(part)).count()
    }
}

/// Launches of one step of anything that multiplies by a weight, with element-wise chains around
/// it.
fn step_of<const D: usize>(
    weight: &Param<Tensor<B, D>>,
    forward: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
    seed: u64,
) -> Launched {
    let [m, k, n] = SHAPE;
    let x = tensor::<B, 2>(normal(m * k, seed), [m, k]).require_grad();
    let dy = tensor::<B, 2>(normal(m * n, seed + 1), [m, n]);
    let (_, launched) = Launched::by(|| {
        let y = forward(x.clone() * 0.5 + 1.0) * 0.25 - 1.0;
        let grads = (y * dy).sum().backward();
        (x.grad(&grads).expect("tracked"), weight.grad(&grads).expect("tracked"))
    });
    launched
}

/// Configuration without a self-check: launches are counted and not run, so no result is right.
fn unchecked(recipe: Recipe) -> Float8Config {
    Float8Config::new(recipe).with_self_check(SelfCheck::Off)
}

fn linear(recipe: Recipe) -> Linear<B> {
    let [_, k, n] = SHAPE;
    layer::<Offline>(&unchecked(recipe), tensor(normal(k * n, 2), [k, n]), Some(tensor(normal(n, 3), [n])))
}

/// The layer with a new weight of the same value, as after an optimizer step.
fn rebuilt(layer: Linear<B>) -> Linear<B> {
    let weight = layer.weight.clone().map(|w| Tensor::from_inner(w.inner().mul_scalar(1)).require_grad());
    Linear { weight, ..layer }
}

/// Launches of a linear, forward and backward, by recipe, on an H200. The tables of
/// `docs/dev/kernels.md` have these numbers.
///
/// x, w and dy are cast once, by one kernel that writes both copies: with one amax each, or in MX
/// from one read. A second step finds the copies of w. Steps reuse their memory.
#[test]
fn launches_of_a_linear() {
    let _turn = turn();
    // Launches of our kernels with a new weight and with the same weight again, and allocations in
    // the whole step, which include Burn's element-wise kernels.
    let budgets = [
        (Recipe::Tensorwise, [9, 7, 16]),
        (Recipe::Rowwise, [12, 9, 13]),
        (Recipe::RowwiseWithGwHp, [9, 4, 14]),
        (Recipe::Delayed, [9, 7, 25]),
        (Recipe::Blockwise, [6, 5, 13]),
        (Recipe::Mxfp8, [12, 11, 19]),
        (Recipe::Mxfp8WgradWithHp, [9, 8, 17]),
    ];
    let client = GenerateCuda::client(&OfflineDevice::default());
    let step = |layer: &Linear<B>, seed| step_of(&layer.weight, |x| layer.forward(x), seed);
    let measured = Recipe::ALL.map(|recipe| {
        let layer = linear(recipe);
        let [_, again] = [50, 60].map(|seed| step(&layer, seed));
        // Small allocations are cut from a larger one. The step that creates it allocates once
        // more.
        let steps = [70, 80, 90, 100, 110].map(|seed| {
            let launched = step(&rebuilt(layer.clone()), seed);
            (launched, client.memory_usage().expect("known").bytes_reserved)
        });
        assert_eq!(steps[1].1, steps[4].1, "{recipe}");
        let (new, _) = steps.iter().min_by_key(|(launched, _)| launched.allocations).expect("there are some");
        for launched in [new, &again] {
            assert_eq!(launched.uploads, 0, "{recipe}: {:?}", launched.names);
            // Burn's kernels do need copies, so the counter works and the zero above is real.
            assert!(launched.burn_uploads > 0, "{recipe}");
            // Element-wise operations around the linear are still fused: two before it, three after
            // it, and their gradients.
            assert_eq!(launched.count("elemwise"), 4, "{recipe}: {:?}", launched.names);
        }
        let report = report(&layer);
        report.verify().expect("FP8 ran everywhere");
        // FP8 tensor cores; on Hopper MX takes bf16 ones.
        let (totals, is_mx) = (report.totals(), recipe.to_string().starts_with("mxfp8"));
        assert_eq!(if is_mx { totals.native } else { totals.emulated }, 0, "{recipe}");
        (recipe, [new.own, again.own, new.allocations])
    });
    assert_eq!(measured, budgets);
}

/// A bf16 linear in high precision is three launches, without copies of x, w or dy.
#[test]
fn launches_of_high_precision() {
    let _turn = turn();
    let [_, k, n] = SHAPE;
    let [weight, bias] =
        [tensor::<B, 1>(normal(k * n, 2), [k * n]), tensor(normal(n, 3), [n])].map(|t| t.cast(DType::BF16));
    let layer = layer::<Offline>(&unchecked(Recipe::Tensorwise), weight.reshape([k, n]), Some(bias));
    let forward = |x: Tensor<B, 2>| float8_autocast(false, || layer.forward(x.cast(DType::BF16))).cast(DType::F32);
    let launched = step_of(&layer.weight, forward, 60);
    let names = &launched.names;
    assert_eq!([launched.own, launched.count("gemm_hopper"), launched.uploads], [3, 3, 0], "{names:?}");
    assert_eq!(launched.count("matmul"), 0, "{names:?}");
    let paths = report(&layer).layers[0].gemms().map(|(_, gemm)| (gemm.high_precision, gemm.path.clone()));
    assert_eq!(paths, [(); 3].map(|()| (1, Some("bf16 wgmma".to_string()))));
}

/// A delayed-scaling step ends in a fixed number of launches for any number of layers and
/// micro-batches.
#[test]
fn a_step_of_delayed_scaling_ends_in_a_fixed_number_of_launches() {
    let _turn = turn();
    let launched = |(layers, micro_batches): (usize, u64)| {
        let linear = |_| LinearConfig::new(128, 128).with_bias(false).init::<B>(&Default::default());
        let model: Vec<Linear<B>> = (0..layers).map(linear).collect();
        let model = unchecked(Recipe::Delayed).apply(model).unwrap().0;
        let step = |_| {
            for seed in 0..micro_batches {
                let x = tensor::<B, 2>(normal(128 * 128, seed), [128, 128]).require_grad();
                let y = model.iter().fold(x, |x, layer| layer.forward(x));
                y.sum().backward();
            }
            Launched::by(|| begin_float8_step(&model)).1.names.len()
        };
        [(); 3].map(step)[2]
    };
    let least = launched((1, 1));
    assert!(least > 0);
    assert_eq!([(1, 3), (6, 1), (6, 3)].map(launched), [least; 3]);
}

/// A fused operation is one launch. Linears cast its output like any tensor: once for all readers.
#[test]
fn a_fused_operation_is_launched_once() {
    let _turn = turn();
    let gamma = tensor::<B, 1>(normal(SHAPE[1], 5), [SHAPE[1]]);
    type Op<'a> = &'a dyn Fn(Tensor<B, 2>) -> Tensor<B, 2>;
    let ops: [(&str, Op<'_>); 2] =
        [("swiglu_forward", &|x| swiglu(x.clone(), x)), ("rms_norm_forward", &|x| rms_norm(x, gamma.clone(), 1e-5))];
    for recipe in [Recipe::Rowwise, Recipe::Mxfp8] {
        let layer = linear(recipe);
        let run = |op: Op<'_>| {
            let forward = |x| {
                let h = op(x);
                layer.forward(h.clone()) + layer.forward(h)
            };
            step_of(&layer.weight, forward, 80);
            step_of(&layer.weight, forward, 90)
        };
        let alone = run(&|x| x);
        for (name, op) in ops {
            let behind = run(op);
            let counts = [name, "cast_", "maxima"].map(|name| behind.count(name));
            assert_eq!(counts, [1, alone.count("cast_"), alone.count("maxima")], "{recipe}: {:?}", behind.names);
            assert_eq!(behind.uploads, 0, "{recipe}: {:?}", behind.names);
        }
    }
}

/// The weight gradient of groups casts x and dy again, with padded groups, but computes no second
/// amax.
#[test]
fn a_grouped_linear_looks_for_each_amax_once() {
    let _turn = turn();
    let [m, k, n] = SHAPE;
    let groups = 3;
    let weight = tensor::<B, 3>(normal(groups * k * n, 2), [groups, k, n]).require_grad();
    let experts = GroupedLinear { weight: Param::initialized(ParamId::new(), weight) };
    let experts = unchecked(Recipe::Tensorwise).apply(experts).unwrap().0;
    let ends = [20, 20, m as i32];
    // The second step finds both copies of w.
    for (amaxes, casts) in [(3, 6), (2, 4)] {
        let ends = Tensor::<B, 1, Int>::from_ints(ends, &OfflineDevice::default());
        let launched = step_of(&experts.weight, |x| experts.forward(x, ends), 50);
        let counts = ["partial_maxima", "gemm_hopper"].map(|name| launched.count(name));
        assert_eq!((counts, launched.uploads), ([amaxes, 3], 0), "{:?}", launched.names);
        assert_eq!(launched.count("cast_linear") + launched.count("cast_tiles"), casts, "{:?}", launched.names);
    }
    report(&experts).verify().expect("FP8 ran everywhere");
}

/// q, k and v of a Llama 8B layer in bf16. Checks are off.
fn heads() -> [Tensor<B, 4>; 3] {
    linear(Recipe::Tensorwise);
    [32, 8, 8].map(|heads| {
        let zeros = Tensor::<B, 4>::zeros([1, heads, 8192, 128], &OfflineDevice::default());
        zeros.cast(DType::BF16).require_grad()
    })
}

/// A Llama 8B layer's attention: one launch forward, and one for the classes of tiles with
/// documents. Backward takes statistics, then dq, then dk and dv. One query over a cache takes parts
/// of the keys, then combines them. No upload and no wait.
#[test]
fn launches_of_attention() {
    let _turn = turn();
    let [q, k, v] = heads();
    let dy = q.clone().detach();
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let ids = Tensor::<B, 2, Int>::zeros([1, 8192], &OfflineDevice::default());
    let kernels = ["attention_hopper", "stats_of_rows", "classify", "attention_mma", "attention_combine"];
    let assert_launched = |launched: &Launched, counts: [usize; 5]| {
        assert_eq!((kernels.map(|name| launched.count(name)), launched.uploads), (counts, 0), "{:?}", launched.names);
    };
    for (documents, classes) in [(None, 0), (Some(ids), 1)] {
        let (y, forward) = Launched::by(|| attention(q.clone(), k.clone(), v.clone(), documents, options));
        // Burn's sum uploads shapes in backward.
        assert_eq!(forward.burn_uploads, 0, "{:?}", forward.names);
        assert_launched(&forward, [1, 0, classes, 0, 0]);
        let (_, backward) = Launched::by(|| (y * dy.clone()).sum().backward());
        assert_launched(&backward, [2, 1, classes, 0, 0]);
    }
    let [query, keys, values] = [(q, 0..1), (k, 0..8000), (v, 0..8000)].map(|(t, at)| t.detach().slice_dim(2, at));
    let (_, decode) = Launched::by(|| attention(query, keys, values, None, options));
    assert_launched(&decode, [0, 0, 0, 1, 1]);
    assert_eq!(decode.names.len(), 2, "{:?}", decode.names);
}

/// Backward of a Llama 8B layer, in blocks of queries: dk and dv accumulate in place, and the host
/// sends the positions once.
#[test]
fn attention_in_blocks_adds_in_place() {
    // A process reads the request once.
    alone(module_path!(), "attention_in_blocks_adds_in_place", &[("FLOAT8_ATTENTION", "blocks")], || {
        let (_turn, idle) = (turn(), idle());
        let [q, k, v] = heads();
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = attention(q, k, v, None, options);
        sync();
        let _before = (idle.take_bytes(), idle.take_uploads());
        y.sum().backward();
        sync();
        // A copy of dk and dv for each of 128 blocks would be 16 GiB more.
        assert_eq!((idle.take_uploads(), idle.take_bytes() >> 30), (2, 128));
    });
}

/// A pair of granularities without an FP8 tensor-core kernel is named, and is an error in strict
/// mode. MX on Hopper is no error: its kernel is the intended one there.
#[test]
fn pairs_without_a_kernel_for_fp8_tensor_cores_are_errors_in_strict_mode() {
    let _turn = turn();
    let cast = |granularity| CastConfig::dynamic(granularity, Format::E4m3);
    let casts = Recipe::Tensorwise.casts();
    let casts = casts.with(Operand::INPUT, cast(Granularity::Row));
    let casts = casts.with(Operand::WEIGHT_T, cast(Granularity::Block128x128));
    let mixed = Float8LinearConfig::new(Recipe::Tensorwise).with_casts(casts);
    let apply = |config: Float8LinearConfig, is_strict| {
        let layer: Linear<B> = LinearConfig::new(128, 128).with_bias(false).init(&Default::default());
        let config = Float8Config::from(config).with_self_check(SelfCheck::Off).with_strict(is_strict);
        config.apply(layer).map(drop).map_err(|refused| refused.error.to_string())
    };
    let error = apply(mixed.clone(), true).unwrap_err();
    let want = "cast_config_* = rowwise with 128x128: linear: runs as f16 mma: no FP8 kernel takes this pair";
    assert!(error.contains(want), "{error}");
    assert_eq!(apply(mixed, false), Ok(()));
    assert_eq!(apply(Float8LinearConfig::new(Recipe::Mxfp8), true), Ok(()));
}
