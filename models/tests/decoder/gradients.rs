//! Gradients of the loss against finite differences.

use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::tensor::Tensor;
use models::Decoder;

use crate::common::{ids, model, tiny, tokens, values};

type B = Autodiff<Flex>;

#[test]
fn gradients_match_finite_differences() {
    let model = model::<B>(tiny(), 3);
    let (inputs, targets) = (tokens([2, 5], 288, 3), tokens([2, 5], 288, 4));
    let loss = |model: &Decoder<B>| model.loss(ids(&inputs, [2, 5]), ids(&targets, [2, 5]));
    let grads = loss(&model).backward();
    // A direction per parameter: d loss / d t of w + t·g is |g|².
    let check = |name: &str, weight: fn(&mut Decoder<B>) -> &mut Param<Tensor<B, 2>>| {
        let grad = weight(&mut model.clone()).val().grad(&grads).unwrap();
        let square = values(grad.clone().square().sum())[0];
        let at = |t: f32| {
            let mut moved = model.clone();
            let param = weight(&mut moved);
            let step = Tensor::from_inner(grad.clone().mul_scalar(t));
            *param = param.clone().map(|w| w + step);
            values(loss(&moved))[0]
        };
        let t = 0.02 / square.sqrt();
        let slope = (at(t) - at(-t)) / (2.0 * t);
        assert!((slope - square).abs() < 0.02 * square, "{name}: {slope} {square}");
    };
    check("q_proj", |m| &mut m.layers[0].self_attn.q_proj.weight);
    check("k_proj", |m| &mut m.layers[1].self_attn.k_proj.weight);
    check("v_proj", |m| &mut m.layers[0].self_attn.v_proj.weight);
    check("down_proj", |m| &mut m.layers[1].mlp.as_mut().unwrap().down_proj.weight);
    check("embed_tokens", |m| &mut m.embed_tokens.weight);
}
