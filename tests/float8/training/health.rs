//! Statistics of sampled steps against the definition, and the fallback that they cause.
use burn::module::AutodiffModule;
use burn::nn::{Initializer, Linear};
use burn::tensor::Tensor;
use burn_float8::backend::Float8Backend;
use burn_float8::config::{FallbackTo, Format, Granularity, Operand};
use burn_float8::report::{CastHealth, LayerReport, OperandHealth};
use burn_float8::{
    FallbackConfig, Float8Config, Float8LinearConfig, Float8State, GroupedLinear, Recipe, StatisticsConfig, report,
};
use float8_kernels::reference;

use crate::on_cpu_and_wgpu;
use crate::support::linear::{A, from_values};
use crate::support::operand::tensor;
use crate::support::runtime::Flex;
use crate::support::{self, normal, oracle, updated};

const M: usize = 33;
const K: usize = 140;
const N: usize = 20;

fn linear<B: Float8Backend>(config: Float8Config) -> Linear<A<B>> {
    support::linear::layer::<B>(&config, tensor(normal(K * N, 4), [K, N]), None)
}

/// Forward and backward.
fn run<B: Float8Backend>(xs: &[f32], forward: impl FnOnce(Tensor<A<B>, 2>) -> Tensor<A<B>, 2>) {
    let x = tensor::<A<B>, 2>(xs.to_vec(), [M, K]).require_grad();
    let dy: Tensor<A<B>, 2> = tensor(normal(M * N, 9), [M, N]);
    (forward(x) * dy).sum().backward();
}

/// Forward and backward, then a new weight.
fn step<B: Float8Backend>(linear: Linear<A<B>>, xs: &[f32]) -> Linear<A<B>> {
    run(xs, |x| linear.forward(x));
    updated(linear)
}

fn layer<B: Float8Backend>(linear: &Linear<A<B>>) -> LayerReport {
    report(linear).layers.remove(0)
}

/// Statistics of the last sampled x.
fn health_of_x<B: Float8Backend>(linear: &Linear<A<B>>) -> OperandHealth {
    layer(linear).fprop.operands[0].health.clone().expect("a step was sampled")
}

fn sampled(config: impl Into<Float8Config>) -> Float8Config {
    config.into().with_statistics(StatisticsConfig::every(1))
}

/// Many binades, some zeros, and some values that flush to zero.
fn input() -> Vec<f32> {
    let values = normal(M * K, 1).into_iter().enumerate();
    let scaled = |(i, x): (usize, f32)| match i % 11 {
        0 => 0.0,
        1 | 2 => x * 1e-6,
        _ => x * 2f32.powi(i as i32 % 7 - 3),
    };
    values.map(scaled).collect()
}

fn expected(xs: &[f32], shape: [usize; 2], config: &Float8LinearConfig, scaling: Option<f32>) -> CastHealth {
    let matrix = oracle::matrix(xs, shape, config.casts()[Operand::INPUT], config, scaling).expect("it is cast");
    let health = reference::health(xs, &matrix.view());
    CastHealth {
        sqnr_db: health.sqnr_db(),
        saturated: health.saturated_share(),
        flushed: health.flushed_share(),
        non_finite: 0,
    }
}

fn assert_near(ours: &CastHealth, want: &CastHealth, what: &str) {
    let (a, b) = (ours.sqnr_db.unwrap(), want.sqnr_db.unwrap());
    assert!((a - b).abs() < 0.01, "{what}: SQNR {a}, not {b}");
    assert!((ours.saturated - want.saturated).abs() < 1e-9, "{what}: {ours:?}, not {want:?}");
    assert!((ours.flushed - want.flushed).abs() < 1e-9, "{what}: {ours:?}, not {want:?}");
    assert_eq!(ours.non_finite, want.non_finite, "{what}");
}

fn statistics_on<B: Float8Backend>(runtime: &str) {
    let xs = input();
    let compare = [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Mxfp8];
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8] {
        let statistics = StatisticsConfig::every(1).with_compare(compare);
        let linear = step(linear::<B>(Float8Config::new(recipe).with_statistics(statistics)), &xs);
        let health = health_of_x(&linear);
        assert_eq!(health.step, 1);
        assert!(health.cast.flushed > 0.01, "the input is to flush: {health:?}");
        assert_eq!(health.compare.iter().map(|(r, _)| *r).collect::<Vec<_>>(), compare);
        for (by, cast) in [(recipe, health.cast)].into_iter().chain(health.compare) {
            let want = expected(&xs, [M, K], &Float8LinearConfig::new(by), None);
            assert_near(&cast, &want, &format!("{runtime} {recipe} by {by}"));
        }
        let report = report(&linear);
        let mut operands = report.layers[0].gemms().into_iter().flat_map(|(_, calls)| &calls.operands);
        assert!(operands.all(|operand| operand.health.is_some()), "{runtime} {recipe}: {report}");
        let text = report.to_string();
        assert!(text.contains("SQNR dB") && text.contains("rowwise:"), "{text}");
    }
}

#[test]
fn statistics_equal_their_definition() {
    on_cpu_and_wgpu!(statistics_on);
}

/// Zeros between the groups of a weight gradient do not count as elements of x and dy.
fn padding_on<B: Float8Backend>(runtime: &str) {
    let xs = input();
    for recipe in [Recipe::Rowwise, Recipe::Blockwise, Recipe::Mxfp8] {
        let config = sampled(Float8Config::new(recipe));
        let dense = step(linear::<B>(config.clone()), &xs);
        let device = Default::default();
        let experts = GroupedLinear::<A<B>>::new(1, K, N, &Initializer::Zeros, &device);
        let experts = config.apply(experts).unwrap().0;
        run(&xs, |x| experts.forward(x, Tensor::from_ints([M as i32], &device)));
        let experts = updated(experts);
        let [want, ours] = [report(&dense), report(&experts)].map(|report| report.layers[0].wgrad.operands.clone());
        for (want, ours) in want.iter().zip(&ours) {
            let [want, ours] = [want, ours].map(|operand| operand.health.clone().expect("every step is sampled").cast);
            assert_near(&ours, &want, &format!("{runtime} {recipe}"));
        }
        assert!(want[0].health.as_ref().is_some_and(|health| health.cast.flushed > 0.01), "{runtime} {recipe}");
    }
}

#[test]
fn padding_is_in_no_share() {
    on_cpu_and_wgpu!(padding_on);
}

fn saturation_on<B: Float8Backend>(runtime: &str) {
    let config = Float8LinearConfig::new(Recipe::Delayed);
    let first = normal(M * K, 1);
    let amax = first.iter().fold(0f32, |m, x| m.max(x.abs()));
    let second: Vec<_> = first.iter().map(|x| x * 1.5).collect();
    let linear = step(step(linear::<B>(sampled(config.clone())), &first), &second);
    let health = health_of_x(&linear);
    assert_eq!(health.step, 2);
    assert!(health.cast.saturated > 0.0, "{health:?}");
    assert_near(&health.cast, &expected(&second, [M, K], &config, Some(amax)), runtime);
}

#[test]
fn saturation_is_counted() {
    on_cpu_and_wgpu!(saturation_on);
}

/// Amax and scale are reported without statistics, in every recipe.
fn amax_and_scale_on<B: Float8Backend>(runtime: &str) {
    let xs = input();
    let amax = xs.iter().fold(0f32, |m, x| m.max(x.abs()));
    for recipe in Recipe::ALL {
        let report = layer(&step(linear::<B>(Float8Config::new(recipe)), &xs));
        let config = Float8LinearConfig::new(recipe);
        let granularity = config.casts()[Operand::INPUT].scaling_granularity;
        let scale = reference::amax_to_scale(amax, Format::E4m3, config.scale_mode(granularity)).get();
        let [x, w] = &report.fprop.operands;
        assert_eq!((x.amax, x.scale), (Some(amax), Some(scale)), "{runtime} {recipe}");
        assert!(report.dgrad.operands[0].amax.is_some() && w.scale.is_some(), "{runtime} {recipe}");
        assert!(report.gemms().iter().all(|(_, g)| g.operands.iter().all(|o| o.health.is_none())), "not asked for");
        let padding = report.fprop.padding().unwrap();
        let stored = if report.fprop.path.as_deref() == Some("host") { K } else { K.next_multiple_of(16) };
        assert!((padding - (stored as f64 / K as f64 - 1.0)).abs() < 1e-12, "{runtime}: {padding}");
        let bytes = report.fprop.bytes().unwrap();
        assert!(bytes >= (M * stored + N * stored) as u64, "{runtime} {recipe}: {bytes}");
        if granularity == Granularity::Block1x32 {
            // One byte for each block on the host; on a device, whole tiles of 128 rows by four
            // bytes.
            let scales = if stored == K { (M + N) * K.div_ceil(32) } else { 2 * 512 * K.div_ceil(128) };
            assert_eq!(bytes as usize, (M + N) * stored + scales, "{runtime} {recipe}");
        }
    }
}

#[test]
fn amax_and_scale_are_always_reported() {
    on_cpu_and_wgpu!(amax_and_scale_on);
}

#[test]
fn statistics_are_sampled_every_n_steps() {
    let mut linear = linear::<Flex>(Float8Config::tensorwise().with_statistics(StatisticsConfig::every(3)));
    let mut sampled = vec![];
    for i in 0..7 {
        linear = step(linear, &normal(M * K, i));
        sampled.push(health_of_x(&linear).step);
    }
    assert_eq!(sampled, [1, 1, 1, 4, 4, 4, 7]);
}

/// A copy that another GEMM reads with another cast has its own amax and scale.
#[test]
fn each_gemm_reports_its_own_scale() {
    let report = layer(&step(linear::<Flex>(Float8Config::new(Recipe::RowwiseWithGwHp)), &input()));
    // First rowwise, then tensorwise. Both scales are rounded down to powers of two.
    let scales = [report.fprop.operands[1].scale, report.dgrad.operands[1].scale].map(Option::unwrap);
    assert_eq!(scales[0], scales[1], "the largest element of both");
    let bytes = [&report.fprop, &report.dgrad].map(|g| g.operands[1].size.unwrap().bytes);
    assert_eq!(bytes, [(K * N + 4 * N) as u64, (K * N + 4) as u64]);
    assert_eq!(report.wgrad.operands[0].scale, None, "in high precision");
}

/// Only forwards with a backward are sampled, and limits apply at the end of the step.
#[test]
fn evaluations_and_reports_decide_nothing() {
    let limits = FallbackConfig { max_flushed: Some(0.05), max_non_finite: Some(0), ..FallbackConfig::default() };
    let config = sampled(Float8Config::tensorwise().with_fallback(limits));
    let well = normal(M * K, 1);
    let linear = step(linear::<Flex>(config.clone()), &well);
    // Badly conditioned data, used only for evaluation.
    linear.valid().forward(tensor(input(), [M, K]));
    assert_eq!(layer(&linear).policy, "tensorwise");
    // That evaluation began the step, which training samples.
    let x = tensor::<A<Flex>, 2>(input(), [M, K]).require_grad();
    linear.forward(x.clone()).sum().backward();
    assert_eq!(layer(&linear).policy, "tensorwise", "a report between micro-batches moves nothing");
    linear.forward(x).sum().backward();
    let linear = step(linear, &well);
    linear.valid().forward(tensor(well.clone(), [M, K]));
    assert!(layer(&linear).policy.starts_with("high precision: fallback"), "{}", layer(&linear).policy);

    let mut broken = well;
    broken[7] = f32::NAN;
    let linear = step(step(self::linear::<Flex>(config), &broken), &broken);
    let fallback = layer(&linear).fallback.unwrap().reason;
    // One scale for the tensor, so every code is NaN.
    assert_eq!(fallback, format!("{} elements of input not finite, limit 0", M * K));
}

/// A layer beyond a limit moves once. The report says so, and a saved state keeps it.
#[test]
fn layers_fall_back() {
    let limits = |to| FallbackConfig { max_flushed: Some(0.05), to, ..FallbackConfig::default() };
    let config = |to| sampled(Float8Config::tensorwise().with_fallback(limits(to)));
    let (well, ill) = (normal(M * K, 1), input());
    for (to, policy) in [(FallbackTo::HighPrecision, "high precision: fallback"), (FallbackTo::Rowwise, "rowwise")] {
        let linear = step(step(linear::<Flex>(config(to)), &well), &well);
        assert_eq!(layer(&linear).policy, "tensorwise");
        let before_fallback = Float8State::export(&linear);
        let linear = step(linear, &ill);
        // The step is over, even for a state that is saved now: a resumed run starts with the layer
        // moved.
        let state = serde_json::to_string(&Float8State::export(&linear)).unwrap();
        let resumed = self::linear::<Flex>(config(to));
        serde_json::from_str::<Float8State>(&state).unwrap().restore(&resumed).unwrap();
        for moved in [layer(&resumed), layer(&linear)] {
            assert!(moved.policy.starts_with(policy), "{}", moved.policy);
            let fallback = moved.fallback.unwrap();
            assert_eq!((fallback.step, fallback.to), (3, to));
            assert!(fallback.reason.contains("input flushed to zero, limit 5%"), "{}", fallback.reason);
        }
        // A running model can be restored to the earlier policy.
        before_fallback.restore(&resumed).unwrap();
        assert_eq!((layer(&resumed).policy.as_str(), layer(&resumed).fallback), ("tensorwise", None));

        // The moved policy is in use, and survives another `apply`.
        let linear = config(to).apply(linear).unwrap().0;
        let before = layer(&linear).fprop;
        let after = layer(&step(linear, &well)).fprop;
        let calls = [after.emulated - before.emulated, after.high_precision - before.high_precision];
        assert_eq!(calls, if to == FallbackTo::Rowwise { [1, 0] } else { [0, 1] }, "{to:?}");
    }
}

/// If rowwise is not enough, the layer ends in high precision.
#[test]
fn rowwise_may_fall_back_too() {
    let fallback = FallbackConfig { min_sqnr_db: Some(60.0), to: FallbackTo::Rowwise, ..FallbackConfig::default() };
    let config = sampled(Float8Config::tensorwise().with_fallback(fallback));
    let x = normal(M * K, 1);
    let linear = step(step(linear::<Flex>(config), &x), &x);
    assert_eq!(layer(&linear).policy, "rowwise");
    let linear = step(linear, &x);
    assert!(layer(&linear).policy.starts_with("high precision: fallback: SQNR of"), "{}", layer(&linear).policy);
}

/// Statistics do not change results.
#[test]
fn statistics_leave_the_numbers_alone() {
    let (x, w, dy) = (input(), normal(K * N, 4), normal(M * N, 5));
    let statistics = StatisticsConfig::every(1).with_compare([Recipe::Blockwise]);
    for recipe in Recipe::ALL {
        let run = |config: Float8Config| from_values::<Flex>(&config, [&x, &w, &dy], [M, K, N], None);
        let plain = run(Float8Config::new(recipe));
        assert_eq!(run(Float8Config::new(recipe).with_statistics(statistics.clone())), plain, "{recipe}");
    }
}
