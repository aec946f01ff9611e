//! The global gradient norm and clipping.

use crate::common::*;

type B = Autodiff<Flex>;

fn gradients(model: &Decoder<B>) -> GradientsParams {
    let (inputs, targets) = (tokens([2, 5], 288, 1), tokens([2, 5], 288, 2));
    let loss = model.loss(ids(&inputs, [2, 5]), ids(&targets, [2, 5]));
    GradientsParams::from_grads(loss.backward(), model)
}

fn flat(model: &Decoder<B>, grads: &GradientsParams) -> Vec<f32> {
    struct Collect<'a>(&'a GradientsParams, Vec<f32>);
    impl ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.1.extend(values(self.0.get::<Flex, D>(param.id).expect("every parameter has a gradient")));
        }
    }
    let mut collect = Collect(grads, Vec::new());
    model.visit(&mut collect);
    collect.1
}

fn clipped<M: AutodiffModule<B>>(model: &M, grads: &mut GradientsParams, limit: f64) -> f64 {
    f64::from(values(clip_grad_norm(model, grads, limit, None, &Default::default()).unwrap())[0])
}

#[test]
fn the_norm_is_over_all_parameters_and_clipping_scales_all_alike() {
    let model = model::<B>(tiny(), 1);
    let mut grads = gradients(&model);
    let before = flat(&model, &grads);
    assert_eq!(before.len(), model.num_params());
    let expected = before.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
    // No limit, a larger limit, then a smaller one: the norm is of before clipping.
    for (limit, factor) in [(f64::INFINITY, 1.0), (2.0 * expected, 1.0), (0.25 * expected, 0.25)] {
        let norm = clipped(&model, &mut grads, limit);
        assert!((norm - expected).abs() < 1e-5 * expected, "{norm} {expected}");
        let scaled: Vec<f32> = before.iter().map(|g| g * factor).collect();
        let error = relative(&flat(&model, &grads), &scaled);
        assert!(error < 1e-4 && (factor < 1.0 || error == 0.0), "{limit}: {error}");
    }
    let after = clipped(&model, &mut grads, f64::INFINITY);
    assert!((after - 0.25 * expected).abs() < 1e-4 * expected);
    assert_eq!(clipped(&model, &mut GradientsParams::new(), 1.0), 0.0, "of no gradients");
}

/// Gradients in bf16 are squared and summed in f32: 4096 of 1 + 2^-7 have a norm of 64.5.
#[test]
fn norms_of_bf16_gradients_are_in_f32() {
    let weight = Tensor::<B, 2>::ones([64, 64], &Default::default()).cast(DType::BF16).detach().require_grad();
    let linear = Linear { weight: Param::from_tensor(weight), bias: None };
    let loss = (linear.weight.val() * 1.0078125).sum();
    let mut grads = GradientsParams::from_grads(loss.backward(), &linear);
    let norm = clipped(&linear, &mut grads, f64::INFINITY);
    assert!((norm - 64.5).abs() < 1e-4, "{norm}");
}

/// Order documented by [`sum`].
fn sum_by_columns(values: Vec<f32>) -> f32 {
    let width = values.len().div_ceil(256).next_power_of_two();
    let (whole, left) = values.split_at(values.len() / width * width);
    let mut columns = vec![0.0_f32; width];
    for row in whole.chunks(width) {
        columns.iter_mut().zip(row).for_each(|(column, value)| *column += value);
    }
    if width == 1 { columns[0] } else { sum_by_columns([&columns, left].concat()) }
}

/// Flex's own sum of large tensors depends on the scheduling of cores.
#[test]
fn sums_have_one_order() {
    let limit = 4 << 20;
    let mut rng = Rng::new(1);
    // Both signs, so that the sum is small compared to the rounding errors, which reveals another
    // order.
    let all: Vec<f32> = (0..2 * limit + 12_345).map(|_| rng.uniform() as f32 - 0.5).collect();
    let device = Default::default();
    let bits = |tensor: Tensor<Flex, 1>| values(tensor)[0].to_bits();
    for count in [1, 300, limit - 1] {
        let tensor = Tensor::<Flex, 1>::from_floats(&all[..count], &device);
        assert_eq!(bits(sum(tensor.clone())), bits(tensor.sum()), "{count} elements, as in earlier versions");
    }
    for count in [limit, limit + 1, all.len()] {
        let tensor = Tensor::<Flex, 1>::from_floats(&all[..count], &device);
        let expected = sum_by_columns(all[..count].to_vec());
        assert_eq!(bits(sum(tensor.clone())), expected.to_bits(), "{count} elements");
        let exact: f64 = all[..count].iter().map(|value| f64::from(*value)).sum();
        assert!((f64::from(expected) - exact).abs() < 1e-7 * count as f64, "{expected} {exact}");
        if count % 2 == 0 {
            assert_eq!(bits(sum(tensor.reshape([2, count / 2]))), expected.to_bits(), "{count} elements in two rows");
        }
    }
}
