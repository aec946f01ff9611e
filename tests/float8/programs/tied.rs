//! Tied embeddings: the output is a matmul with the embedding, which is not a linear's weight and
//! never FP8.
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};

use crate::programs::support::{
    B, Plain, applied, assert_all_in_float8, assert_falls, bits, tensor, train, with_parameters,
};

const D: usize = 16;
const VOCABULARY: usize = 12;
const STEPS: u64 = 10;

#[derive(Module, Debug)]
struct Tied<B: Backend> {
    embedding: Embedding<B>,
    body: Linear<B>,
}

impl<B: Backend> Tied<B> {
    fn new() -> Self {
        let device = Default::default();
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, D).init(&device),
            body: LinearConfig::new(D, D).init(&device),
        }
    }

    /// `[batch, tokens]` to `[batch * tokens, VOCABULARY]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let h = self.body.forward(self.embedding.forward(tokens)).flatten::<2>(0, 1);
        self.logits(h)
    }

    fn logits(&self, h: Tensor<B, 2>) -> Tensor<B, 2> {
        h.matmul(self.embedding.weight.val().transpose())
    }
}

fn tokens<B: Backend>() -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..12).map(|i| (i * 5 + 1) % VOCABULARY as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, 6]), &Default::default())
}

fn loss(model: &Tied<B>) -> Tensor<B, 1> {
    let targets = tokens::<B>().flatten::<1>(0, 1);
    CrossEntropyLossConfig::new().init(&targets.device()).forward(model.forward(tokens()), targets)
}

/// Neither strictness nor the matmul option applies: the embedding belongs to no linear.
#[test]
fn a_tied_output_is_never_float8_and_nothing_else_breaks() {
    let linear = Float8LinearConfig::new(Recipe::Tensorwise).with_matmul(true);
    let config = Float8Config::from(linear).with_strict(true);
    let model: Tied<B> = applied(&config, Tied::new());
    let plain: Tied<Plain> = with_parameters(Tied::new(), 1);
    let h = [5, D];
    assert_eq!(bits(model.logits(tensor(h, 1))), bits(plain.logits(tensor(h, 1))));
    let (model, losses) = train(model, 0..STEPS, |m, _| loss(m));
    assert_falls(&losses);
    assert_all_in_float8(&model, &["body"], STEPS);
}
