//! FP8-only weights: the same bits as with high-precision values, and refused operations.
use std::error::Error;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_float8::backend::{Float8Backend, HostCodes};
use burn_float8::config::Granularity;
use burn_float8::{Float8, Float8Config, Float8Error, Float8LinearConfig, Float8Stack, Recipe, report, weights};
use float8_kernels::InvScale;
use test_data::panic_of;

use crate::support::linear::A;
use crate::support::operand::{dequantized, tensor, values};
use crate::support::runtime::Flex;
use crate::support::{assert_near, spread};
use crate::{on_cpu_and_wgpu, on_every_runtime};

/// No multiple of any recipe's block.
const K: usize = 150;
const N: usize = 70;

/// Configurations by name, one for each kind of weight cast.
fn configs() -> Vec<(String, Float8Config)> {
    use Recipe::*;
    let recipes = [Tensorwise, Rowwise, RowwiseWithGwHp, Delayed, Blockwise, Mxfp8];
    let squares = Float8LinearConfig::new(Mxfp8).with_mx_square_weights(true);
    let plain = recipes.map(|recipe| (recipe.to_string(), Float8Config::new(recipe)));
    plain.into_iter().chain([("squares".to_string(), squares.into())]).collect()
}

fn linear<B: Backend>(seed: u64) -> Linear<B> {
    let mut linear = LinearConfig::new(K, N).init(&Default::default());
    linear.weight = Param::from_tensor(tensor(spread(K, N, seed), [K, N]));
    linear.bias = Some(Param::from_tensor(tensor(spread(1, N, 9), [N])));
    linear
}

/// FP8-only linear, and its codes.
fn fp8_only<B: Float8Stack>(config: &Float8Config, linear: Linear<B>) -> (Linear<B>, HostCodes) {
    let (model, _) = weights::fp8_only(config.apply(linear).unwrap().0).unwrap();
    let (_, codes) = weights::read_codes(&model).next().expect("one weight");
    (model, codes)
}

fn x<B: Backend>() -> Tensor<B, 2> {
    tensor(spread(9, K, 5), [9, K])
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Decoded values, `[K, N]`, by the scalar reference.
fn decoded(codes: &HostCodes) -> Vec<f32> {
    let values = dequantized(codes);
    (0..K * N).map(|i| values[i % N * K + i / N]).collect()
}

fn outputs_are_the_same_on<B: Float8Backend>(runtime: &str) {
    for (name, config) in configs() {
        let what = format!("{name} on {runtime}");
        let (model, _) = config.apply::<Float8<B>, _>(linear(1)).unwrap();
        let want = bits(values(model.forward(x())));
        let (model, fp8_only) = weights::fp8_only(model).unwrap();
        assert_eq!((fp8_only.layers.len(), fp8_only.elements), (1, (K * N) as u64), "{what}: {fp8_only}");
        assert_eq!(bits(values(model.forward(x()))), want, "{what}");
        let row = report(&model).layers.remove(0);
        assert!(row.fp8_only.is_some() && row.decodes.is_empty(), "{what}: {row:?}");
        let (_, codes) = weights::read_codes(&model).next().expect("one weight");
        assert_eq!(bits(values(model.weight.val())), bits(decoded(&codes)), "{what}");
        let row = report(&model).layers.remove(0);
        assert_eq!(row.decodes, [("float_into_data".into(), 1)].into(), "{what}");
    }
}

#[test]
fn outputs_are_those_of_the_model_with_values() {
    on_every_runtime!(outputs_are_the_same_on);
}

/// dx of a frozen FP8-only weight matches dx of a high-precision weight with the decoded values.
fn gradients_on<B: Float8Backend>(runtime: &str) {
    for (name, config) in configs() {
        let what = format!("{name} on {runtime}");
        let dx = |model: &Linear<A<B>>| {
            let x = x::<A<B>>().require_grad();
            let y = model.forward(x.clone());
            let grads = (y.clone() * tensor(spread(9, N, 8), [9, N])).sum().backward();
            (values(y.inner()), values(x.grad(&grads).expect("x wants one")))
        };
        let (model, codes) = fp8_only::<A<B>>(&config, linear(1).no_grad());
        let got = dx(&model);
        let row = report(&model).layers.remove(0);
        let is_one_copy = ["tensorwise", "delayed", "blockwise", "squares"].contains(&&*name);
        assert_eq!(row.decodes.get("cast").copied().unwrap_or_default(), u64::from(!is_one_copy), "{what}: {row:?}");
        let mut other = linear(2).no_grad();
        other.weight = Param::from_tensor(tensor(decoded(&codes), [K, N]));
        let (other, _) = config.apply::<A<B>, _>(other.no_grad()).unwrap();
        let want = dx(&other);
        assert_near(&what, &got.0, &want.0, 1e-6);
        assert_near(&what, &got.1, &want.1, 1e-6);
    }
}

#[test]
fn gradients_are_those_of_the_decoded_values() {
    on_cpu_and_wgpu!(gradients_on);
}

/// A linear with these codes and without a bias.
fn loaded<B: Float8Stack>(config: &Float8Config, codes: &HostCodes) -> Result<Linear<B>, Box<dyn Error + Send + Sync>> {
    let lazy = LinearConfig::new(K, N).with_bias(false).init(&Default::default());
    let (linear, fp8_only) = weights::load_codes(lazy, config, DType::F32, |info| {
        assert_eq!((&*info.name, info.k, info.n), ("linear", K, N));
        Ok(Some(codes.clone()))
    })?;
    assert_eq!((fp8_only.layers, fp8_only.kept), (vec!["linear".to_string()], vec![]));
    Ok(config.apply(linear).unwrap().0)
}

fn codes_are_loaded_on<B: Float8Backend>(runtime: &str) {
    for (name, config) in configs() {
        let what = format!("{name} on {runtime}");
        let (model, mut codes) = fp8_only::<Float8<B>>(&config, linear(1));
        let y = |linear: &Linear<Float8<B>>| bits(values(linear.forward(x())));
        let bare = loaded::<Float8<B>>(&config, &codes).unwrap();
        assert_eq!(weights::read_codes(&bare).next().expect("one weight").1.codes, codes.codes, "{what}");
        assert_eq!(y(&Linear { bias: model.bias.clone(), ..bare }), y(&model), "{what}");
        if name == "rowwise" {
            // Other programs write zeros with the scale 0.
            codes.codes[3 * K..4 * K].fill(0x80);
            let [one, zero] = [1.0, 0.0].map(|scale| {
                codes.inv_scales[3] = InvScale::new(scale);
                y(&loaded(&config, &codes).unwrap())
            });
            assert_eq!(zero, one, "{what}");
        }
    }
}

#[test]
fn codes_of_a_file_are_loaded_as_they_are() {
    on_cpu_and_wgpu!(codes_are_loaded_on);
}

type Cpu = Float8<Flex>;

#[test]
fn codes_that_do_not_fit_are_refused() {
    let config = Float8Config::new(Recipe::Rowwise);
    let (_, good) = fp8_only::<Cpu>(&config, linear(1));
    let scale = |x: f32| vec![InvScale::new(x); N];
    let mut with_nan = good.codes.clone();
    with_nan[K + 3] = 0x7f;
    let cases = [
        (HostCodes { dims: [K, N], ..good.clone() }, "the weight is [N, K] = [70, 150]"),
        (HostCodes { codes: vec![0; 7], ..good.clone() }, "are 7, not 70 · 150"),
        (HostCodes { inv_scales: vec![], ..good.clone() }, "with 0 scales, where rowwise has 70 · 1"),
        (HostCodes { codes: with_nan, ..good.clone() }, "0x7f at row 1, column 3"),
        (HostCodes { inv_scales: scale(0.0), ..good.clone() }, "with the scale 0"),
        (HostCodes { inv_scales: scale(-1.0), ..good.clone() }, "with the scale -1"),
        (HostCodes { inv_scales: scale(f32::NAN), ..good.clone() }, "with the scale NaN"),
        (
            HostCodes { codes: vec![0x7e; K * N], inv_scales: scale(f32::powi(2.0, 127)), ..good.clone() },
            "beyond f32: 0x7e · 170141180000000000000000000000000000000 at row 0, column 0",
        ),
        (
            HostCodes { granularity: Granularity::Block1x32, inv_scales: vec![InvScale::new(3.0); N * 5], ..good },
            "the scale 3, which is no power of two",
        ),
    ];
    for (codes, words) in cases {
        let error = loaded::<Cpu>(&config, &codes).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Float8Error::Codes { .. })), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// Values loaded into an FP8-only model become codes. From a record, which holds values, they are
/// equal up to the rounding of a scale.
#[test]
fn records_hold_the_values() {
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    for (name, config) in configs() {
        let (model, _) = fp8_only::<Cpu>(&config, linear(1));
        let want = values(model.weight.val());
        let bytes = recorder.record(model.clone().into_record(), ()).unwrap();
        let (other, _) = fp8_only::<Cpu>(&config, linear(3));
        let other = other.load_record(recorder.load(bytes, &Default::default()).unwrap());
        assert!(report(&other).layers[0].fp8_only.is_some(), "{name}");
        let got = values(other.weight.val());
        let is_close = |(got, want): (&f32, &f32)| (got - want).abs() <= 2e-7 * want.abs();
        assert!(got.iter().zip(&want).all(is_close), "{name}");
        let is_power_of_two = !["tensorwise", "delayed", "blockwise"].contains(&&*name);
        assert!(got == want || !is_power_of_two, "{name}");
    }
}

#[test]
fn a_gradient_of_codes_is_refused_by_name() {
    type T = A<Flex>;
    let (model, _) = fp8_only::<T>(&Float8Config::tensorwise(), linear(1));
    let message = panic_of(|| {
        model.forward(x());
    });
    assert!(message.contains("linear: its weight is FP8-only"), "{message}");
    // The check for training loops gives the same error.
    let refused = weights::check_frozen(&model).unwrap_err();
    assert!(message.contains(&refused.to_string()), "{refused}");
    assert_eq!(refused, Float8Error::Fp8OnlyTrained { layer: "linear".into() });
    weights::check_frozen(&model.no_grad()).unwrap();
}

/// No configuration was applied, so there is no cast.
#[test]
fn a_model_without_a_configuration_is_given_back() {
    let refused = weights::fp8_only::<Cpu, _>(linear(1)).unwrap_err();
    assert!(matches!(refused.error, Float8Error::NotApplied));
    assert_eq!(refused.model.weight.dims(), [K, N]);
}
