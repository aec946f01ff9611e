//! A backend that is only wrapped.
//!
//! Runs in its own process: once a configuration was applied, linears outside applied models run in
//! high precision.
#[allow(dead_code)]
mod support;

use burn::backend::Autodiff;
use burn::backend::wgpu::WgpuRuntime;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn_cubecl::CubeBackend;
use burn_float8::{Float8, Float8Config, report, set_default_config};

use support::model::{D, Model};
use support::normal;
use support::operand::{tensor, values};
use support::runtime::has_wgpu;

/// FP8 copies of untagged weights live no longer than copies of tagged weights.
#[test]
fn copies_of_untagged_models_live_no_longer_either() {
    type Own = CubeBackend<WgpuRuntime, f32, i64, u8>;
    type A = Float8<Autodiff<Own>>;
    if !has_wgpu("copies_of_untagged_models_live_no_longer_either") {
        return;
    }
    let model = Model::<A>::new(1);
    let y = model.forward(tensor(normal(2 * 4 * D, 1), [2, 4, D]));
    let live = |model: &Model<A>| report(model).layers.iter().map(|l| l.live_copies).sum::<u64>();
    assert!(live(&model) > 0);
    let grads = GradientsParams::from_grads(y.powf_scalar(2.0).mean().backward(), &model);
    let model = SgdConfig::new().init::<A, Model<A>>().step(0.1, model, grads);
    assert_eq!(live(&model), 0);
}

/// Wrapping the backend is enough for FP8. Without a default, results equal the inner backend's,
/// bit for bit.
///
/// The default belongs to the device and the backend's type, so this test has its own type.
#[test]
fn untagged_linears_follow_the_devices_default() {
    if !has_wgpu("untagged_linears_follow_the_devices_default") {
        return;
    }
    fn run<B: burn::tensor::backend::AutodiffBackend>() -> [Vec<f32>; 3] {
        let (x, w, b) = (normal(5 * 24, 1), normal(24 * 12, 2), normal(12, 3));
        let x = tensor::<B, 2>(x, [5, 24]).require_grad();
        let w = tensor::<B, 2>(w, [24, 12]).require_grad();
        let y = burn::tensor::module::linear(x.clone(), w.clone(), Some(tensor(b, [12])));
        let grads = y.clone().powf_scalar(2.0).sum().backward();
        [values(y), values(x.grad(&grads).unwrap()), values(w.grad(&grads).unwrap())]
    }
    type Own = CubeBackend<WgpuRuntime, f32, i64, u32>;
    type A = Float8<Autodiff<Own>>;
    let device = Default::default();
    let plain = run::<Autodiff<Own>>();
    let fp8 = run::<A>();
    for (fp8, plain) in fp8.iter().zip(&plain) {
        let sqnr = support::sqnr(fp8, plain);
        assert!((15.0..60.0).contains(&sqnr), "FP8 by default, so near but not equal: {sqnr} dB");
    }
    set_default_config::<A>(&device, None).unwrap();
    assert_eq!(run::<A>(), plain);
    set_default_config::<A>(&device, Some(&Float8Config::tensorwise())).unwrap();
    assert_eq!(run::<A>(), fp8);
}
