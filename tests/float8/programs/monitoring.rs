//! Monitoring of linears while a model trains.
use burn::tensor::Tensor;
use burn_float8::{
    Float8Config, Monitor, Recipe, StatisticsConfig,
    report::{Amaxes, Gemm, NonFiniteOperand, Report},
    without_float8,
};

use crate::programs::support::models::Mlp;
use crate::programs::support::{B, applied, mean_square, own_report, train, x};

fn loss(model: &Mlp<B>, step: u64) -> Tensor<B, 1> {
    mean_square(model.forward(x(step)))
}

#[test]
fn calls_and_statistics_are_those_of_the_report() {
    for recipe in [Recipe::Tensorwise, Recipe::RowwiseWithGwHp] {
        let config = Float8Config::new(recipe).with_statistics(StatisticsConfig::every(1));
        let model: Mlp<B> = applied(&config, Mlp::new());
        let monitor = Monitor::new(&model);
        assert!(monitor.gemm_calls().is_empty());
        // The optimizer's model has the same layers.
        let (model, _) = train(model, 0..3, loss);
        let (report, calls, health) = (own_report(&model), monitor.gemm_calls(), monitor.health());
        let totals = report.totals();
        let of = |path| calls.get(path).copied().unwrap_or_default();
        assert_eq!([of("host"), of("high_precision")], [totals.emulated, totals.high_precision]);
        assert_eq!(Monitor::new(&model).gemm_calls(), calls);
        assert_eq!(calls.values().sum::<u64>(), totals.emulated + totals.high_precision);
        let all = monitor.calls();
        assert_eq!(all.len(), report.layers.len());
        for layer in &report.layers {
            let of_report = layer.gemms().map(|(_, gemm)| [gemm.native, gemm.emulated, gemm.high_precision]);
            assert_eq!(all[&layer.name].map(|calls| [calls.native, calls.emulated, calls.high_precision]), of_report);
            let [x, w] = &layer.fprop.operands;
            assert!(x.health.is_some() && w.health.is_some());
            for (name, operand) in [("input", x), ("weight_t", w), ("grad_output_t", &layer.wgrad.operands[1])] {
                let found = health.iter().find(|sampled| sampled.layer == layer.name && sampled.operand == name);
                assert_eq!(found.map(|sampled| &sampled.health), operand.health.as_ref(), "{recipe} {name}");
            }
        }
    }
}

/// First non-finite operand after forward and backward of a loss.
fn first(
    model: &Mlp<B>,
    monitor: &Monitor<B>,
    loss: impl Fn(Tensor<B, 2>) -> Tensor<B, 1>,
) -> Option<NonFiniteOperand> {
    loss(model.forward(x(1))).backward();
    let amaxes: Amaxes = monitor.amaxes();
    // Later steps do not change the taken amaxes.
    mean_square(model.forward(x(2))).backward();
    amaxes.first_non_finite()
}

#[test]
fn the_first_operand_that_is_not_finite() {
    for recipe in Recipe::ALL {
        let config = Float8Config::new(recipe);
        let operand = |of: &NonFiniteOperand| (of.layer.clone(), of.gemm, of.role);
        let model: Mlp<B> = applied(&config, Mlp::new());
        let monitor = Monitor::new(&model);
        assert_eq!(first(&model, &monitor, mean_square), None, "{recipe}");
        // Backward: the last layer reads it first.
        let infinite = first(&model, &monitor, |y| y.mul_scalar(f32::INFINITY).sum()).unwrap();
        assert_eq!(operand(&infinite), ("second".into(), Gemm::Dgrad, "grad_output"), "{recipe}");
        assert!(!infinite.amax.is_finite());
        assert!(monitor.health().is_empty(), "nothing is sampled");
        // Forward: a weight, and its consequences.
        for (name, value) in [("first", f32::NAN), ("second", f32::INFINITY)] {
            let mut model: Mlp<B> = applied(&config, Mlp::new());
            let linear = if name == "first" { &mut model.first } else { &mut model.second };
            linear.weight = linear.weight.clone().map(|w| w.mul_scalar(value).detach().require_grad());
            let monitor = Monitor::new(&model);
            let found = first(&model, &monitor, mean_square).unwrap();
            assert_eq!(operand(&found), (name.into(), Gemm::Fprop, "weight"), "{recipe}");
            assert_eq!(found.amax.is_nan(), value.is_nan(), "{recipe} {found}");
        }
    }
}

#[test]
fn without_a_configuration_there_is_nothing_to_see() {
    let model = Mlp::<B>::new();
    let monitor = Monitor::new(&model);
    loss(&model, 1).backward();
    assert!(monitor.gemm_calls().is_empty() && monitor.amaxes().first_non_finite().is_none());
    let off = without_float8(applied(&Float8Config::tensorwise(), Mlp::<B>::new()));
    loss(&off, 1).backward();
    let monitor = Monitor::new(&off);
    assert_eq!(monitor.gemm_calls().keys().collect::<Vec<_>>(), ["high_precision"]);
    assert!(monitor.amaxes().first_non_finite().is_none());
}

/// Includes statistics and numbers that JSON cannot represent.
#[test]
fn a_report_that_was_written_can_be_read() {
    let config = Float8Config::tensorwise().with_statistics(StatisticsConfig::every(1));
    let model: Mlp<B> = applied(&config, Mlp::new());
    let (model, _) = train(model, 0..1, loss);
    model.forward(x::<B>(1) * f32::INFINITY);
    let report = own_report(&model);
    assert_eq!(report.layers[0].fprop.operands[0].amax, Some(f32::INFINITY));
    let written = serde_json::to_value(&report).unwrap();
    assert_eq!(serde_json::from_value::<Report>(written).unwrap(), report);
}
