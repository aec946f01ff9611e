//! Gradients of a batch with fewer activations in memory: activation checkpointing by segments, and
//! logits in chunks of tokens.
//!
//! ```text
//! forward     x_0 = first,  x_{i+1} = segment_i(x_i)                no graph: only every n-th x is kept
//! head        dx_n = ∂loss/∂x_n                                     rows by rows
//! backward    dx_i = dx_{i+1} · ∂segment_i/∂x_i,  i = n-1 .. 0      one graph of n segments at a time
//! ```
//! Burn 0.21 deadlocks if the backward of an operation calls `backward` (burn#5193), so the chain
//! is cut at the level of the model. A segment's backward begins with `(y · dy).sum()`, whose
//! gradient with respect to y is dy, bit for bit.

use anyhow::Result;
use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};

use crate::batches::{Batch, BatchTensors};
use crate::config::{ConfigError, TrainingSection};
use crate::model::{LanguageModel, Segments};
use crate::optimizer::ModelSlot;
use crate::ranks::Ranks;

/// Number of logits, tokens times vocabulary, above which they are computed in chunks by default:
/// 512 MiB.
const MANY_LOGITS: usize = 1 << 27;

/// Bounds of the activations in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointingPlan {
    /// Segments with a graph at a time; `None` for all.
    group: Option<usize>,
    /// Tokens with logits at a time; `None` for all.
    chunk: Option<usize>,
    /// Whether the configuration requests this, so that a model without segments is an error.
    needs_segments: bool,
}

impl CheckpointingPlan {
    /// Plan for a configuration and a vocabulary size, if known.
    pub(crate) fn new(training: &TrainingSection, vocab_size: Option<usize>) -> Self {
        let group = training.activation_checkpointing.layers();
        let rows = training.batch_size.saturating_mul(training.seq_len);
        let many = vocab_size.filter(|vocab_size| rows.saturating_mul(*vocab_size) > MANY_LOGITS);
        // Half of the limit at a time, rounded to tiles of GEMMs.
        let automatic = many.map(|vocab_size| (MANY_LOGITS / 2 / vocab_size / 128 * 128).max(128));
        let chunk = training.loss_chunk.or(automatic).filter(|chunk| *chunk < rows);
        Self { group, chunk, needs_segments: group.is_some() || chunk.is_some() && training.loss_chunk.is_some() }
    }

    /// Segments with a graph at a time; `None` for all.
    pub(crate) fn group(&self) -> Option<usize> {
        self.group
    }

    /// Tokens with logits at a time; `None` for all.
    pub(crate) fn chunk(&self) -> Option<usize> {
        self.chunk
    }
}

/// Loss of a batch, without a graph.
pub(crate) fn loss<B: Backend, M: LanguageModel<B>>(
    model: &M,
    batch: &Batch,
    plan: CheckpointingPlan,
    device: &B::Device,
) -> Tensor<B, 1> {
    let tensors = batch.tensors::<B>(device);
    let chunked = plan.chunk.and_then(|chunk| Some((chunk, model.segments(tensors.clone())?)));
    let Some((chunk, segments)) = chunked else { return model.batch_loss(tensors) };
    let hidden = (0..segments.len()).fold(segments.first(), |hidden, index| segments.segment(index, hidden));
    let losses = ranges(segments.rows(), chunk).map(|rows| segments.loss(hidden.clone().slice(rows.clone()), rows));
    losses.reduce(|sum, loss| sum + loss).expect("a batch has tokens")
}

/// Loss of a batch times `scale`. Passes its gradients to `apply`, by group of segments as soon as
/// they exist, and `apply` may change the model. The last call has the gradients of the head and of
/// the first segment's input, which may belong to the same parameter.
///
/// # Errors
/// [`ConfigError::Value`] if the plan needs segments and the model has none; the errors of `apply`.
pub(crate) fn gradients<B: AutodiffBackend, M: LanguageModel<B> + AutodiffModule<B>>(
    model: &mut ModelSlot<M>,
    batch: &Batch,
    plan: CheckpointingPlan,
    ranks: Option<&Ranks>,
    scale: impl Fn(Tensor<B, 1>) -> Tensor<B, 1>,
    device: &B::Device,
    mut apply: impl FnMut(&mut ModelSlot<M>, GradientsParams) -> Result<()>,
) -> Result<Tensor<B::InnerBackend, 1>> {
    let tensors = &batch.tensors::<B>(device);
    let is_plain = plan.group.is_none() && plan.chunk.is_none();
    if is_plain || model.segments(tensors.clone()).is_none() {
        if plan.needs_segments {
            return Err(no_segments(plan).into());
        }
        let loss = scale(model.batch_loss(tensors.clone()));
        let grads = GradientsParams::from_grads(loss.backward(), &**model);
        apply(model, grads)?;
        return Ok(loss.inner());
    }
    // If all segments have a graph: the end of the graph, and no inputs.
    let (graph, mut inputs, hidden) = match plan.group {
        None => {
            let segments = segments(&**model, tensors);
            let end = (0..segments.len()).fold(segments.first(), |hidden, index| segments.segment(index, hidden));
            (Some(end.clone()), vec![], end.inner())
        }
        Some(group) => {
            // Uses the autodiff backend, because the inner one may round differently. There is no
            // graph, since no parameter requires a gradient.
            let frozen = M::clone(&**model).no_grad();
            let (inputs, hidden) = forward(&*segments(&frozen, tensors), group);
            (None, inputs, hidden)
        }
    };
    let mut last = GradientsAccumulator::new();
    let (loss, mut dy, of_head) = head(&**model, &*segments(&**model, tensors), hidden, (plan.chunk, ranks), scale);
    last.accumulate(&**model, of_head);
    while let (Some(input), Some(group)) = (inputs.pop(), plan.group) {
        let (dx, grads) = through(&*segments(&**model, tensors), inputs.len() * group, group, input, dy);
        dy = dx;
        let grads = GradientsParams::from_grads(grads, &**model);
        apply(model, grads)?;
    }
    let grads = backward(graph.unwrap_or_else(|| segments(&**model, tensors).first()), dy);
    last.accumulate(&**model, GradientsParams::from_grads(grads, &**model));
    apply(model, last.grads())?;
    Ok(loss)
}

/// Segments of a model that has them.
fn segments<'a, B: Backend, M: LanguageModel<B>>(model: &'a M, tensors: &BatchTensors<B>) -> Box<dyn Segments<B> + 'a> {
    model.segments(tensors.clone()).expect("a model either has segments or does not")
}

/// Loss and its gradients with respect to the last hidden states and to parameters, with logits of
/// `chunk` rows at a time. Parameter gradients of chunks are added in f32, because a sum in bf16
/// would be rounded after every chunk. Ranks reduce them with the last chunk.
fn head<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    segments: &dyn Segments<B>,
    hidden: Tensor<B::InnerBackend, 2>,
    (chunk, ranks): (Option<usize>, Option<&Ranks>),
    scale: impl Fn(Tensor<B, 1>) -> Tensor<B, 1>,
) -> (Tensor<B::InnerBackend, 1>, Tensor<B::InnerBackend, 2>, GradientsParams) {
    let (mut loss, mut parts, mut sums) = (None, vec![], GradientsAccumulator::new());
    for rows in ranges(segments.rows(), chunk.unwrap_or(segments.rows())) {
        if let Some(ranks) = ranks {
            ranks.set_requires_gradient_sync(rows.end == segments.rows());
        }
        let hidden = leaf::<B>(hidden.clone().slice(rows.clone()));
        let part = scale(segments.loss(hidden.clone(), rows));
        loss = Some(loss.map_or(part.clone().inner(), |sum| sum + part.clone().inner()));
        let mut grads = part.backward();
        parts.push(gradient::<B>(&hidden, &mut grads));
        let mut grads = GradientsParams::from_grads(grads, model);
        if chunk.is_some() {
            cast(model, &mut grads, Some(DType::F32));
        }
        sums.accumulate(model, grads);
    }
    let mut grads = sums.grads();
    cast(model, &mut grads, None);
    let dy = if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) };
    (loss.expect("a batch has tokens"), dy, grads)
}

/// Casts the gradients of a model to this dtype, or to the parameters' dtypes.
fn cast<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M, grads: &mut GradientsParams, dtype: Option<DType>) {
    struct Cast<'a>(&'a mut GradientsParams, Option<DType>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Cast<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = self.0.remove::<B::InnerBackend, D>(param.id) {
                let dtype = self.1.unwrap_or_else(|| param.val().dtype());
                self.0.register(param.id, if grad.dtype() == dtype { grad } else { grad.cast(dtype) });
            }
        }
    }
    model.visit(&mut Cast(grads, dtype));
}

/// Gradients of `count` segments from `first` on with input `input`: with respect to the input, and
/// to parameters.
fn through<B: AutodiffBackend>(
    segments: &dyn Segments<B>,
    first: usize,
    count: usize,
    input: Tensor<B::InnerBackend, 2>,
    dy: Tensor<B::InnerBackend, 2>,
) -> (Tensor<B::InnerBackend, 2>, B::Gradients) {
    let input = leaf::<B>(input);
    let last = first.saturating_add(count).min(segments.len());
    let output = (first..last).fold(input.clone(), |hidden, index| segments.segment(index, hidden));
    let mut grads = backward(output, dy);
    (gradient::<B>(&input, &mut grads), grads)
}

/// Inputs of the groups of segments, and the output of the last.
fn forward<B: AutodiffBackend>(
    segments: &dyn Segments<B>,
    group: usize,
) -> (Vec<Tensor<B::InnerBackend, 2>>, Tensor<B::InnerBackend, 2>) {
    let (mut inputs, mut hidden) = (vec![], segments.first());
    for index in 0..segments.len() {
        if index.is_multiple_of(group) {
            inputs.push(hidden.clone().inner());
        }
        hidden = segments.segment(index, hidden);
    }
    (inputs, hidden.inner())
}

/// Gradients, given the gradient `dy` of `y`.
fn backward<B: AutodiffBackend>(y: Tensor<B, 2>, dy: Tensor<B::InnerBackend, 2>) -> B::Gradients {
    let sum = (y * Tensor::from_inner(dy)).sum();
    // Burn's autodiff panics if nothing requires a gradient, as below a frozen embedding.
    let nothing = Tensor::<B, 1>::zeros([1], &sum.device()).cast(sum.dtype()).require_grad();
    (sum + nothing).backward()
}

fn leaf<B: AutodiffBackend>(tensor: Tensor<B::InnerBackend, 2>) -> Tensor<B, 2> {
    Tensor::from_inner(tensor).require_grad()
}

/// Gradient of a leaf; zeros if nothing depends on it.
fn gradient<B: AutodiffBackend>(leaf: &Tensor<B, 2>, grads: &mut B::Gradients) -> Tensor<B::InnerBackend, 2> {
    leaf.grad_remove(grads).unwrap_or_else(|| leaf.clone().inner().zeros_like())
}

/// Splits `0..rows` into ranges of `chunk` rows.
fn ranges(rows: usize, chunk: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..rows).step_by(chunk).map(move |start| start..(start + chunk).min(rows))
}

fn no_segments(plan: CheckpointingPlan) -> ConfigError {
    let (key, value) = match plan {
        CheckpointingPlan { group: Some(group), .. } => ("training.activation_checkpointing", group),
        CheckpointingPlan { chunk, .. } => ("training.loss_chunk", chunk.unwrap_or_default()),
    };
    ConfigError::Value {
        key,
        value: value.to_string(),
        reason: "this model cannot be cut: it has no `LanguageModel::segments`".into(),
    }
}

#[cfg(test)]
mod tests {
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
    fn results(net: &Net<B>, plan: CheckpointingPlan) -> Result<(f32, Vec<Vec<f32>>)> {
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
            let plain = CheckpointingPlan { group: None, chunk: None, needs_segments: false };
            let want = results(&net, plain).unwrap();
            for group in [1, 2, 5, 9] {
                let plan = CheckpointingPlan { group: Some(group), ..plain };
                assert_eq!(results(&net, plan).unwrap(), want, "{recipe}, every {group}");
            }
            // Sums over rows are in another order.
            for (group, chunk) in [(None, 7), (Some(2), 1), (None, 20)] {
                let (loss, grads) = results(&net, CheckpointingPlan { group, chunk: Some(chunk), ..plain }).unwrap();
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
            let error =
                results(&net, CheckpointingPlan { group, chunk, needs_segments: true }).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("LanguageModel::segments"), "{error}");
        }
        // Automatic chunks are skipped if the model has no segments.
        let [plain, automatic] =
            [None, Some(7)].map(|chunk| CheckpointingPlan { group: None, chunk, needs_segments: false });
        assert_eq!(results(&net, automatic).unwrap(), results(&net, plain).unwrap());
    }

    /// For a bf16 output layer with one token at a time, the gradient is as accurate as in one piece. A
    /// sum in bf16 would not be.
    #[test]
    fn chunks_of_an_output_in_bf16_are_added_up_in_f32() {
        let plain = CheckpointingPlan { group: None, chunk: None, needs_segments: false };
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
        let (whole, single) = (error(plain), error(CheckpointingPlan { chunk: Some(1), ..plain }));
        assert!(whole > 0.0 && single < 2.0 * whole, "{single:e}, at once {whole:e}");
    }
}
