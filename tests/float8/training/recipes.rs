//! Guarantees of recipes: SQNR of a linear, and settings that change memory or speed but no
//! result.
use burn::backend::Autodiff;
use burn::nn::LayerNormConfig;
use burn::tensor::activation::softmax;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn_float8::backend::Float8Backend;
use burn_float8::config::{CastConfig, Casts};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe, report, report::Role};

use crate::on_cpu_and_wgpu;
use crate::support::linear::{A, forward_backward, layer};
use crate::support::model::{D, Model};
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, oracle, sqnr};

/// SQNR of y, dx and dw against products in f64, for normal x, w and dy.
#[test]
fn a_linear_keeps_its_signal() {
    let shape @ [m, k, n] = [128, 256, 320];
    let [x, w, dy] = [normal(m * k, 1), normal(k * n, 2), normal(m * n, 3)];
    let off = CastConfig::disabled();
    let off = Float8LinearConfig::new(Recipe::Tensorwise).with_casts(Casts::new(off, off, off));
    let exact = oracle::linear([&x, &w, &dy], shape, None, &off, [None; 3]);
    for recipe in Recipe::ALL {
        let layer = layer::<Flex>(&Float8Config::new(recipe), tensor(w.clone(), [k, n]), None);
        let ours = forward_backward(&layer, tensor(x.clone(), [m, k]), tensor::<_, 2>(dy.clone(), [m, n]));
        for (((what, ours), exact), floor) in ["y", "dx", "dw"].iter().zip(&ours).zip(&exact).zip([27.0, 24.0, 24.0]) {
            let sqnr = sqnr(ours, &exact.elements.iter().map(|element| element.want as f32).collect::<Vec<_>>());
            println!("{recipe} {what}: {sqnr:.1} dB");
            assert!(sqnr >= floor, "{recipe} {what}: {sqnr} dB");
        }
        let wgrad = &report(&layer).layers[0].wgrad;
        let is_off = matches!(recipe, Recipe::RowwiseWithGwHp | Recipe::Mxfp8WgradWithHp);
        assert_eq!(wgrad.reason.as_deref(), is_off.then_some("disabled by the recipe"), "{recipe}");
    }
}

/// Weight copies are dropped after fprop and recreated in backward. No result changes.
#[test]
fn weights_can_be_cast_again_in_backward() {
    let run = |recompute: bool, recipe| {
        let config = Float8LinearConfig::new(recipe).with_force_recompute_fp8_weight_in_bwd(recompute);
        let block = Float8Config::from(config).apply(Model::<A<Flex>>::new(1)).unwrap().0.blocks.remove(0);
        let x = tensor::<A<Flex>, 2>(normal(8 * D, 4), [8, D]);
        let y = block.down.forward(block.gate.forward(x.clone()).tanh() * block.up.forward(x));
        let layers = report(&block).layers;
        let copies: u64 = layers.iter().map(|layer| layer.live_copies).sum();
        let bytes: u64 = layers.iter().map(|layer| layer.live_bytes).sum();
        // Two activations in both orientations, since gate and up share theirs. Three weights, one
        // of them for dgrad too: gate and up need no dx, since the batch needs no gradient.
        assert_eq!(copies, if recompute { 4 } else { 8 }, "{recipe}");
        assert!(recompute || bytes >= 3 * block.gate.weight.val().shape().num_elements() as u64);
        let grads = y.clone().powf_scalar(2.0).sum().backward();
        let dw = [&block.gate, &block.up, &block.down].map(|l| values(l.weight.grad(&grads).unwrap()));
        let layers = report(&block).layers;
        let layer = |name| layers.iter().find(|layer| layer.name.ends_with(name)).expect("a layer");
        let casts = ["gate", "up", "down"].map(|name| layer(name).casts[Role::Weight as usize]);
        ((values(y), dw), casts)
    };
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Blockwise, Recipe::Delayed, Recipe::Mxfp8] {
        let (kept, once) = run(false, recipe);
        let (recomputed, again) = run(true, recipe);
        assert_eq!(kept, recomputed, "{recipe}");
        // Recomputed: once in forward, and in backward where there is a dgrad.
        assert_eq!((once, again), ([1; 3], [1, 1, 2]), "{recipe}");
    }
}

/// Operations other than linears run on the inner backend, bit for bit, and enter no counter.
fn untouched_on<B: Float8Backend>(runtime: &str) {
    fn run<B: AutodiffBackend>() -> Vec<Vec<f32>> {
        let q = tensor::<B, 3>(normal(2 * 6 * 8, 1), [2, 6, 8]).require_grad();
        let k = tensor::<B, 3>(normal(2 * 6 * 8, 2), [2, 6, 8]);
        let scores = softmax(q.clone().matmul(k.clone().swap_dims(1, 2)) / 8f32.sqrt(), 2);
        let attention = scores.matmul(k.clone());
        let image = tensor::<B, 4>(normal(2 * 3 * 5 * 5, 3), [2, 3, 5, 5]);
        let kernel = tensor::<B, 4>(normal(4 * 3 * 3 * 3, 4), [4, 3, 3, 3]);
        let conv = conv2d(image, kernel, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1));
        let norm = LayerNormConfig::new(8).init::<B>(&Default::default()).forward(attention.clone());
        let grads = norm.clone().powf_scalar(2.0).sum().backward();
        vec![values(attention), values(conv), values(norm), values(q.grad(&grads).unwrap())]
    }
    assert_eq!(run::<A<B>>(), run::<Autodiff<B>>(), "{runtime}");
}

#[test]
fn what_is_no_linear_is_untouched() {
    on_cpu_and_wgpu!(untouched_on);
}
