//! y, dx, dw and db of the decorator against the definition in f64: exact products of dequantized
//! operands.
use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_float8::{
    Float8, Float8Config, Float8LinearConfig, Recipe,
    backend::Float8Backend,
    config::{CastConfig, Casts, Format, Granularity, Operand, ScaleCalculationMode},
    report::Gemm,
};

use crate::on_every_runtime;
use crate::support::operand::{tensor, values};
use crate::support::{max_error, normal, oracle, spread};

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

fn gradients_on<B: Float8Backend>(runtime: &str) {
    type A<B> = Float8<Autodiff<B>>;
    // More than one block of 128 along every axis; no size is a multiple.
    let [batch, tokens, k, n] = [3, 47, 133, 150];
    let m = batch * tokens;
    let (xs, ws, bs, dys) = (spread(m, k, 1), spread(k, n, 2), normal(n, 3), spread(m, n, 4));
    for config in configs() {
        let x = tensor::<A<B>, 3>(xs.clone(), [batch, tokens, k]).require_grad();
        let w = tensor::<A<B>, 2>(ws.clone(), [k, n]).require_grad();
        let b = tensor::<A<B>, 1>(bs.clone(), [n]).require_grad();
        let dy: Tensor<A<B>, 3> = tensor(dys.clone(), [batch, tokens, n]);
        let param = |w| Param::initialized(ParamId::new(), w);
        let linear = Linear { weight: param(w), bias: Some(Param::initialized(ParamId::new(), b)) };
        let linear = Float8Config::from(config.clone()).apply(linear).unwrap().0;
        let y = linear.forward(x.clone());
        let grads = (y.clone() * dy).sum().backward();

        let [mut y_exact, dx_exact, dw_exact] = oracle::linear([&xs, &ws, &dys], [m, k, n], &config, [None; 3]);
        y_exact.iter_mut().enumerate().for_each(|(i, v)| *v += bs[i % n]);
        let db_exact: Vec<_> = (0..n).map(|j| (0..m).map(|i| f64::from(dys[i * n + j])).sum::<f64>() as f32).collect();
        let [dw, db] = [linear.weight.grad(&grads).map(values), linear.bias.unwrap().grad(&grads).map(values)];
        for (name, ours, exact) in [
            ("y", values(y), y_exact),
            ("dx", values(x.grad(&grads).unwrap()), dx_exact),
            ("dw", dw.unwrap(), dw_exact),
            ("db", db.unwrap(), db_exact),
        ] {
            // Sums of at most 150 terms in f32.
            let largest = exact.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = max_error(&ours, &exact) / f64::from(largest);
            assert!(error < 2e-6, "{runtime} {config} {name}: {error:e} of the largest");
        }
    }
}

#[test]
fn gradients_equal_their_definition() {
    on_every_runtime!(gradients_on);
}
