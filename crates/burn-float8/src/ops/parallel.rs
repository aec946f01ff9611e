//! Tokens of tensor-parallel linears: gathers of x and dy, sums of y and dx, around their GEMMs.
//! Vocabularies that ranks divide: rows of a table, and log-likelihoods of logits.
use std::sync::Arc;

use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::layer::Layer;
use crate::tensor::{Direction, ParallelHooks, parallel_of};
use crate::terms::Role;

/// Part of a linear on this rank; all of it, if ranks do not divide the linear.
pub(super) struct Tokens<'a, B: Float8Backend>(Option<&'a Arc<dyn ParallelHooks<B>>>);

impl<'a, B: Float8Backend> Tokens<'a, B> {
    pub(super) fn of(layer: &'a Layer) -> Self {
        Self(parallel_of(layer))
    }

    /// The ranks, if each has some tokens of x or dy.
    fn dividing(&self, role: Role) -> Option<&'a Arc<dyn ParallelHooks<B>>> {
        self.0.filter(|hooks| hooks.part().style.gathers(role))
    }

    /// Shape of x or dy with the tokens of all ranks. They are along the axis before the last.
    ///
    /// # Panics
    ///
    /// If a divided tensor has a single axis.
    pub(super) fn whole(&self, role: Role, own: &Shape) -> Shape {
        match self.dividing(role) {
            None => own.clone(),
            Some(hooks) => scaled(own, |tokens| tokens * hooks.part().ranks),
        }
    }

    /// x or dy with the tokens of all ranks.
    pub(super) fn gathered(&self, role: Role, own: FloatTensor<B>) -> FloatTensor<B> {
        match self.dividing(role) {
            Some(hooks) => gather(hooks, own),
            None => own,
        }
    }

    /// Whether the product with all tokens is a term of the sum over ranks: y if ranks divide dy's
    /// tokens, dx if they divide x's.
    pub(super) fn sums(&self, role: Role) -> bool {
        self.dividing(role).is_some()
    }

    /// y or dx of this rank's tokens, from this rank's product with all tokens.
    pub(super) fn reduced(&self, role: Role, product: FloatTensor<B>) -> FloatTensor<B> {
        match self.dividing(role) {
            Some(hooks) => reduce(hooks, product),
            None => product,
        }
    }
}

/// [`gather`] for `Dispatch`, [`reduce`] for `Combine`.
pub(super) fn exchanged<B: Float8Backend>(
    hooks: &Arc<dyn ParallelHooks<B>>,
    tokens: FloatTensor<B>,
    direction: Direction,
) -> FloatTensor<B> {
    match direction {
        Direction::Dispatch => gather(hooks, tokens),
        Direction::Combine => reduce(hooks, tokens),
    }
}

/// Tokens of all ranks `[.., T, C]`, from this rank's `[.., T / ranks, C]`.
fn gather<B: Float8Backend>(hooks: &Arc<dyn ParallelHooks<B>>, own: FloatTensor<B>) -> FloatTensor<B> {
    let all = scaled(&own.shape(), |tokens| tokens * hooks.part().ranks);
    B::float_reshape(hooks.gather_rows(matrix::<B>(own)), all)
}

/// This rank's tokens `[.., T / ranks, C]` of the sum over ranks of `[.., T, C]`.
fn reduce<B: Float8Backend>(hooks: &Arc<dyn ParallelHooks<B>>, all: FloatTensor<B>) -> FloatTensor<B> {
    let own = scaled(&all.shape(), |tokens| divided(tokens, hooks.part().ranks));
    B::float_reshape(hooks.reduce_rows(matrix::<B>(all)), own)
}

/// Part of a layer that ranks divide.
///
/// # Panics
///
/// If ranks do not divide it.
pub(super) fn part_of<B: Float8Backend>(layer: &Layer) -> &Arc<dyn ParallelHooks<B>> {
    parallel_of(layer).expect("ranks divide the layer")
}

/// Tokens of each rank.
///
/// # Panics
///
/// If ranks do not divide them.
fn divided(tokens: usize, ranks: usize) -> usize {
    assert!(tokens.is_multiple_of(ranks), "{ranks} ranks of a tensor-parallel model do not divide {tokens} tokens");
    tokens / ranks
}

/// A tensor `[.., C]` as a matrix.
pub fn matrix<B: Float8Backend>(t: FloatTensor<B>) -> FloatTensor<B> {
    let shape = t.shape();
    let cols = shape[shape.num_dims() - 1];
    B::float_reshape(t, Shape::from(vec![shape.num_elements() / cols.max(1), cols]))
}

/// A shape with another length of the axis before the last.
fn scaled(shape: &Shape, length: impl FnOnce(usize) -> usize) -> Shape {
    let mut dims = shape.to_vec();
    let [.., tokens, _] = &mut dims[..] else {
        panic!("a tensor-parallel linear reads [.., tokens, features], not {dims:?}")
    };
    *tokens = length(*tokens);
    Shape::from(dims)
}

/// Ids, as rows of this rank's part of a vocabulary.
#[derive(Clone)]
pub(super) struct Vocabulary<B: Float8Backend> {
    hooks: Arc<dyn ParallelHooks<B>>,
    /// Row of each id; 0 for an id of another rank.
    own: Tensor<B, 1, Int>,
    /// Whether another rank has the id.
    is_elsewhere: Tensor<B, 1, Bool>,
}

impl<B: Float8Backend> core::fmt::Debug for Vocabulary<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of rank {} of {}", self.own.dims(), self.hooks.part().rank, self.hooks.part().ranks)
    }
}

impl<B: Float8Backend> Vocabulary<B> {
    /// Ids of any shape, M in all, where this rank has `size` ids of the vocabulary.
    fn of_size(hooks: &Arc<dyn ParallelHooks<B>>, size: usize, ids: IntTensor<B>) -> Self {
        let flat = B::int_reshape(ids.clone(), Shape::from(vec![ids.shape().num_elements()]));
        let ids = Tensor::<B, 1, Int>::from_primitive(flat) - (hooks.part().rank * size) as i64;
        let is_elsewhere = ids.clone().lower_elem(0).bool_or(ids.clone().greater_equal_elem(size as i64));
        let own = ids.mask_fill(is_elsewhere.clone(), 0);
        Self { hooks: hooks.clone(), own, is_elsewhere }
    }

    /// Targets `[M]` of this rank's logits `[M, V / ranks]`.
    pub(super) fn new(layer: &Layer, logits: &FloatTensor<B>, targets: IntTensor<B>) -> Self {
        Self::of_size(part_of(layer), logits.shape()[1], targets)
    }

    /// `l_t - ln Σ exp l` over the whole vocabulary, `[M, 1]`, and the logarithms.
    pub(super) fn log_likelihood(&self, logits: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let logits = float::<B, 2>(logits);
        let m = logits.dims()[0];
        let of_targets = logits.clone().gather(1, self.own.clone().unsqueeze_dim(1));
        let of_targets = of_targets.mask_fill(self.is_elsewhere.clone().unsqueeze_dim(1), f32::MIN);
        // One exchange: each rank's logarithm, and the target's logit from the rank that has it.
        let own = Tensor::cat(vec![log_sum(logits, 1), of_targets], 1);
        let all = float::<B, 2>(self.hooks.gather_rows(primitive(own))).reshape([self.hooks.part().ranks, m, 2]);
        let [log_sums, of_targets] = [0, 1].map(|i| all.clone().narrow(2, i, 1).reshape([self.hooks.part().ranks, m]));
        let log_sums = log_sum(log_sums, 0).reshape([m, 1]);
        (primitive(of_targets.max_dim(0).reshape([m, 1]) - log_sums.clone()), primitive(log_sums))
    }

    /// Gradient of this rank's logits: `dy (onehot(t) - softmax(l))`.
    pub(super) fn gradient(
        self,
        logits: FloatTensor<B>,
        log_sums: FloatTensor<B>,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (logits, dy) = (float::<B, 2>(logits), float::<B, 2>(dy));
        let probabilities = (logits - float(log_sums)).exp();
        let of_targets = dy.clone().mask_fill(self.is_elsewhere.unsqueeze_dim(1), 0.0);
        let gradient = (probabilities * dy).neg();
        primitive(gradient.scatter(1, self.own.unsqueeze_dim(1), of_targets, IndexingUpdateOp::Add))
    }
}

/// `ln Σ exp x` along an axis, which is kept.
fn log_sum<B: Float8Backend>(x: Tensor<B, 2>, dim: usize) -> Tensor<B, 2> {
    let max = x.clone().max_dim(dim);
    (x - max.clone()).exp().sum_dim(dim).log() + max
}

fn float<B: Float8Backend, const D: usize>(t: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(t))
}

fn primitive<B: Float8Backend, const D: usize>(t: Tensor<B, D>) -> FloatTensor<B> {
    t.into_primitive().tensor()
}

/// Embeddings of this rank's tokens `[.., T / ranks, H]`, from all ids `[.., T]` and this rank's rows
/// of the table.
pub(super) fn embedding<B: Float8Backend>(
    hooks: &Arc<dyn ParallelHooks<B>>,
    table: FloatTensor<B>,
    ids: IntTensor<B>,
) -> FloatTensor<B> {
    let (table, mut shape) = (float::<B, 2>(table), ids.shape().to_vec());
    let vocabulary = Vocabulary::of_size(hooks, table.dims()[0], ids);
    let rows = table.clone().select(0, vocabulary.own).mask_fill(vocabulary.is_elsewhere.unsqueeze_dim(1), 0.0);
    let own = hooks.reduce_rows(primitive(rows));
    let tokens = shape.last_mut().expect("ids have an axis of tokens");
    *tokens = divided(*tokens, hooks.part().ranks);
    shape.push(table.dims()[1]);
    B::float_reshape(own, Shape::from(shape))
}

/// Ids of all tokens, as rows of this rank's part of a table, and their dy `[M, H]`. This rank has
/// `size` rows. dy is zero for a token whose row another rank has.
pub(super) fn embedding_tokens<B: Float8Backend>(
    hooks: &Arc<dyn ParallelHooks<B>>,
    size: usize,
    ids: IntTensor<B>,
    dy: FloatTensor<B>,
) -> (IntTensor<B>, FloatTensor<B>) {
    let vocabulary = Vocabulary::of_size(hooks, size, ids);
    let all = float::<B, 2>(hooks.gather_rows(matrix::<B>(dy)));
    let all = all.mask_fill(vocabulary.is_elsewhere.unsqueeze_dim(1), 0.0);
    (vocabulary.own.into_primitive(), primitive(all))
}
