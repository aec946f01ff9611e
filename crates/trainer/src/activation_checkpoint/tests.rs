//! A model from outside of this project, as a chain of segments.
use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, silu};
use burn_float8::{Float8, Float8Config, Recipe};

use super::*;
use crate::batches::{AttnMaskType, BatchTensors};

use crate::data::Sequence;

type B = Float8<Autodiff<Flex>>;

const VOCABULARY: usize = 24;
const WIDTH: usize = 32;

/// Residual layers of one linear each, between an embedding and an output layer.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    table: Embedding<B>,
    layers: Vec<Linear<B>>,
    output: Linear<B>,
    is_chain: bool,
}

struct Chain<'a, B: Backend> {
    net: &'a Net<B>,
    batch: BatchTensors<B>,
}

impl<B: Backend> Segments<B> for Chain<'_, B> {
    fn first(&self) -> Tensor<B, 2> {
        self.net.table.forward(self.batch.inputs.clone()).flatten(0, 1)
    }

    fn len(&self) -> usize {
        self.net.layers.len()
    }

    fn segment(&self, index: usize, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        hidden.clone() + silu(self.net.layers[index].forward(hidden))
    }

    fn rows(&self) -> usize {
        self.batch.targets.dims().iter().product()
    }

    fn loss(&self, hidden: Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 1> {
        let targets = self.batch.targets.clone().flatten::<1>(0, 1).slice(rows);
        let likelihoods = log_softmax(self.net.output.forward(hidden), 1).gather(1, targets.unsqueeze_dim(1));
        likelihoods.sum().neg() / self.rows() as f64
    }
}

impl<B: Backend> LanguageModel<B> for Net<B> {
    fn batch_loss(&self, batch: BatchTensors<B>) -> Tensor<B, 1> {
        let chain = Chain { net: self, batch };
        let hidden = (0..chain.len()).fold(chain.first(), |hidden, index| chain.segment(index, hidden));
        chain.loss(hidden, 0..chain.rows())
    }

    fn segments<'a>(&'a self, batch: BatchTensors<B>) -> Option<Box<dyn Segments<B> + 'a>> {
        self.is_chain.then(|| Box::new(Chain { net: self, batch }) as _)
    }

    fn vocab_size(&self) -> Option<usize> {
        Some(VOCABULARY)
    }

    fn flops_per_token(&self, _: usize) -> f64 {
        0.0
    }
}

fn net(is_chain: bool, recipe: Recipe) -> Net<B> {
    let device = Default::default();
    let linear = |n| LinearConfig::new(WIDTH, n).with_bias(false).init(&device);
    let table = EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device);
    let mut net: Net<B> =
        Net { table, layers: (0..5).map(|_| linear(WIDTH)).collect(), output: linear(VOCABULARY), is_chain };
    net = net.map(&mut Numbered(0));
    let filters = ["output".to_string()];
    Float8Config::new(recipe).with_filter_fqns(filters).apply(net).expect("five linears").0
}

/// Sets each parameter to values that depend only on its index.
struct Numbered(usize);

impl<B: Backend> burn::module::ModuleMapper<B> for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        param.map(|tensor| {
            let shape = tensor.shape();
            let value = |i: usize| ((i * 37 + self.0 * 11) % 101) as f32 / 250.0 - 0.2;
            let values: Vec<f32> = (0..shape.num_elements()).map(value).collect();
            Tensor::from_data(burn::tensor::TensorData::new(values, shape), &tensor.device()).require_grad()
        })
    }
}

fn batch() -> Batch {
    let sequence = |seed: usize| Sequence {
        tokens: (0..11).map(|i| ((i * i * 5 + i * seed + seed) % VOCABULARY) as u32).collect(),
        loss_mask: None,
        document_starts: vec![0],
        num_tokens: 11,
    };
    Batch::new(vec![sequence(1), sequence(4)], AttnMaskType::Causal)
}

/// Loss and all gradients.
fn results(net: &Net<B>, plan: Plan) -> Result<(f32, Vec<Vec<f32>>)> {
    struct Collect<'a>(&'a mut GradientsParams, Vec<Vec<f32>>);
    impl ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let gradient = self.0.remove::<Float8<Flex>, D>(param.id).expect("every parameter has a gradient");
            self.1.push(gradient.into_data().convert::<f32>().to_vec().expect("f32"));
        }
    }
    let (mut slot, mut sums) = (ModelSlot::new(net.clone()), GradientsAccumulator::new());
    let loss = gradients(
        &mut slot,
        &batch(),
        plan,
        None,
        |loss| loss * 0.5,
        &Default::default(),
        |net, grads| {
            sums.accumulate(&**net, grads);
            Ok(())
        },
    )?;
    let mut grads = sums.grads();
    let mut collect = Collect(&mut grads, vec![]);
    net.visit(&mut collect);
    Ok((loss.into_scalar(), collect.1))
}

#[test]
fn a_chain_of_ones_own_has_the_same_gradients() {
    for recipe in [Recipe::Tensorwise, Recipe::Blockwise] {
        let net = net(true, recipe);
        let plain = Plan { group: None, chunk: None, needs_segments: false };
        let want = results(&net, plain).unwrap();
        for group in [1, 2, 5, 9] {
            let plan = Plan { group: Some(group), ..plain };
            assert_eq!(results(&net, plan).unwrap(), want, "{recipe}, every {group}");
        }
        // Sums over rows are in another order.
        for (group, chunk) in [(None, 7), (Some(2), 1), (None, 20)] {
            let (loss, grads) = results(&net, Plan { group, chunk: Some(chunk), ..plain }).unwrap();
            assert!((loss - want.0).abs() <= 1e-6 * want.0, "{chunk}: {loss}, not {}", want.0);
            for (i, (grads, want)) in grads.iter().zip(&want.1).enumerate() {
                let largest = want.iter().fold(0f32, |max, x| max.max(x.abs()));
                let error = grads.iter().zip(want).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
                assert!(error <= 1e-6 * largest, "gradient {i}, chunks of {chunk}: {error:e} of {largest:e}");
            }
        }
    }
}

#[test]
fn a_model_that_is_no_chain_says_so() {
    let net = net(false, Recipe::Tensorwise);
    let plans = [(Some(2), None, "training.activation_checkpointing"), (None, Some(7), "training.loss_chunk")];
    for (group, chunk, key) in plans {
        let error = results(&net, Plan { group, chunk, needs_segments: true }).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("LanguageModel::segments"), "{error}");
    }
    // Automatic chunks are skipped if the model has no segments.
    let [plain, automatic] = [None, Some(7)].map(|chunk| Plan { group: None, chunk, needs_segments: false });
    assert_eq!(results(&net, automatic).unwrap(), results(&net, plain).unwrap());
}

/// For a bf16 output layer with one token at a time, the gradient is as accurate as in one piece. A
/// sum in bf16 would not be.
#[test]
fn chunks_of_an_output_in_bf16_are_added_up_in_f32() {
    let plain = Plan { group: None, chunk: None, needs_segments: false };
    let of_output = |net: &Net<B>, plan| results(net, plan).unwrap().1.pop().expect("the output is last");
    let net = net(true, Recipe::Tensorwise);
    let mut narrow = net.clone();
    narrow.output.weight = narrow.output.weight.map(|weight| weight.cast(DType::BF16).detach().require_grad());
    let mut rounded = net;
    rounded.output.weight =
        rounded.output.weight.map(|weight| weight.cast(DType::BF16).cast(DType::F32).detach().require_grad());
    let exact = of_output(&rounded, plain);
    let error = |plan| {
        let errors = of_output(&narrow, plan).into_iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2));
        errors.sum::<f64>().sqrt()
    };
    let (whole, single) = (error(plain), error(Plan { chunk: Some(1), ..plain }));
    assert!(whole > 0.0 && single < 2.0 * whole, "{single:e}, at once {whole:e}");
}
