//! Strict mode, in its own process: the settings of untagged linears belong to it.
use burn::nn::LinearConfig;
use burn::tensor::{DType, Tensor};
use burn_float8::{
    Float8Config, Float8Error, Float8LinearConfig, Recipe, report,
    report::{Gemm, UNTAGGED_NAME},
    set_float8_enabled,
};

use crate::programs::support::models::{D, Mlp};
use crate::programs::support::{B, panic_of, tensor, x};
use crate::support::process::alone;

#[test]
fn strict_mode() {
    alone(module_path!(), "strict_mode", &[], strict_runs);
}

fn strict_runs() {
    let strict = Float8Config::new(Recipe::RowwiseWithGwHp).with_strict(true);

    // Requested high precision is no error: filters, a GEMM that the recipe disables, the schedule,
    // empty batches.
    let filtered = strict.clone().with_filter_fqns(["second"]).apply(Mlp::<B>::new()).unwrap().0;
    filtered.forward(x(1)).sum().backward();
    set_float8_enabled(&filtered, false);
    filtered.first.forward(x(1));
    set_float8_enabled(&filtered, true);
    filtered.first.forward(Tensor::<B, 2>::zeros([0, D], &Default::default()));
    report(&filtered).verify().unwrap();

    // A dtype without FP8 kernels is an error.
    let model64 = strict.apply(Mlp::<B>::new()).unwrap().0;
    let message = panic_of(|| drop(model64.second.forward(tensor::<B, 2>([6, 2 * D], 3).cast(DType::F64))));
    assert_eq!(message, "second: fprop in high precision, unrequested: dtype F64");
    let error = report(&model64).verify().unwrap_err();
    let Float8Error::UnrequestedHighPrecision { layer, gemm, .. } = &error else { panic!("{error}") };
    assert_eq!((layer.as_str(), *gemm), ("second", Gemm::Fprop));

    // A matmul with a weight may be a penalty, so it is no error.
    x::<B>(1).matmul(model64.first.weight.val());
    tensor::<B, 2>([6, 4], 1).matmul(filtered.second.weight.val().transpose());

    // A linear that the configuration never saw is no error: it may belong to another model.
    let stranger = LinearConfig::new(D, 3).init::<B>(&Default::default());
    stranger.forward(x(1));

    // With `matmul = true`, a matmul has the same guarantee as a linear.
    let matmul = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let matmul64 = Float8Config::from(matmul).with_strict(true).apply(Mlp::<B>::new()).unwrap().0;
    x::<B>(1).matmul(matmul64.first.weight.val());
    let message = panic_of(|| drop(x::<B>(1).cast(DType::F64).matmul(matmul64.first.weight.val())));
    assert_eq!(message, "first: fprop in high precision, unrequested: dtype F64");

    // Without strict mode all of it runs and is counted, and `verify` reports it.
    let relaxed = Float8Config::tensorwise().apply(Mlp::<B>::new()).unwrap().0;
    let never = report(&relaxed).verify().unwrap_err();
    assert_eq!(never, Float8Error::NeverCalled { layer: "first".into(), weight_matmuls: 0 });
    relaxed.forward(x(1));
    report(&relaxed).verify().unwrap();
    relaxed.first.forward(x::<B>(1).cast(DType::F64));
    assert!(matches!(report(&relaxed).verify(), Err(Float8Error::UnrequestedHighPrecision { .. })));

    // A layer whose weight is read only by matmul, on either side, does not count as an FP8 layer.
    let matmul = Float8Config::tensorwise().apply(Mlp::<B>::new()).unwrap().0;
    matmul.second.forward(tensor::<B, 2>([6, 2 * D], 3));
    let y = x::<B>(1).matmul(matmul.first.weight.val());
    y.sum().backward();
    matmul.first.weight.val().matmul(tensor::<B, 2>([2 * D, 3], 1));
    let found = report(&matmul);
    assert_eq!(found.layers[0].weight_matmuls, 2, "{found}");
    let error = found.verify().unwrap_err();
    assert_eq!(error, Float8Error::NeverCalled { layer: "first".into(), weight_matmuls: 2 });
    assert!(error.to_string().contains("Tensor::matmul read its weight 2 times"), "{error}");
    assert!(found.to_string().contains("2 reads by Tensor::matmul, not FP8"), "{found}");
    matmul.first.forward(x(1));
    report(&matmul).verify().unwrap();

    // A report of untagged linears has one row for all.
    stranger.forward(x(1));
    let found = report(&stranger);
    assert_eq!((found.layers[0].name.as_str(), found.untagged), (UNTAGGED_NAME, vec!["linear".to_string()]));
}
