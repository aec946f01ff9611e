//! [`Float8Tensor`]: the inner backend's float tensor plus what only linear layers touch.
mod ahead;
mod cache;
mod cast;
mod clones;
mod copies;
mod gathered;
mod recent;
mod sample;

use std::sync::{Arc, OnceLock, Weak};

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::layer::{Layer, Mark, Tag};
pub(crate) use ahead::{Ahead, ShardedWeight};
use cache::Forward;
pub(crate) use cache::{AmaxOf, Fp8Cache, Fp8Copy, Layout, LinearUse};
pub(crate) use cast::{CastRequest, View};
use clones::{Clones, Handle};
pub(crate) use clones::{SavedClone, note_ones};
pub(crate) use copies::{confirm, fp8_copy, observation};
pub(crate) use gathered::amaxes_to_reduce;
pub(crate) use recent::{clear as clear_recent, note_backward, note_forward};
pub(crate) use sample::{is_sampled, push_sample, sample, take_sample};

/// The float primitive of [`Float8<B>`](crate::Float8): the full-precision tensor, the layer it belongs to if it is a
/// linear's weight, and the FP8 copies that all clones of it share.
///
/// A Burn tensor never changes its value, so a copy made once cannot go stale.
pub struct Float8Tensor<B: Float8Backend> {
    full: FloatTensor<B>,
    mark: Option<Mark>,
    handle: Handle<Shared<B>>,
    /// What this is the transpose of, where `Tensor::matmul` runs in FP8: its backward is given transposes.
    transpose_of: Option<Box<Float8Tensor<B>>>,
}

/// What all clones of a tensor share.
struct Shared<B: Float8Backend> {
    clones: Clones,
    /// Filled by the first linear that reads the tensor: any other tensor pays one small allocation.
    cache: OnceLock<Box<Fp8Cache<B>>>,
}

impl<B: Float8Backend> Default for Shared<B> {
    fn default() -> Self {
        Self { clones: Clones::default(), cache: OnceLock::new() }
    }
}

impl<B: Float8Backend> AsRef<Clones> for Shared<B> {
    fn as_ref(&self) -> &Clones {
        &self.clones
    }
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// Wraps a tensor that no linear has seen.
    #[inline]
    pub fn new(full: FloatTensor<B>) -> Self {
        Self { full, mark: None, handle: Handle::default(), transpose_of: None }
    }

    /// The full-precision tensor.
    #[inline]
    pub fn full(&self) -> &FloatTensor<B> {
        &self.full
    }

    /// The full-precision tensor, without the rest.
    #[inline]
    pub fn into_full(self) -> FloatTensor<B> {
        self.full
    }

    /// The layer whose weight this is.
    #[inline]
    pub fn layer(&self) -> Option<&Arc<Layer>> {
        self.tag().map(|tag| &tag.layer)
    }

    /// The same tensor as the weight of a layer that has not seen it. Copies that another layer's linears made stay with that:
    /// a history that counts them would be the other's.
    pub(crate) fn tagged(self, tag: Tag) -> Self {
        Self { mark: Some(Mark::Weight(tag)), ..Self::new(self.full) }
    }

    /// The tag of a linear's weight.
    #[inline]
    pub(crate) fn tag(&self) -> Option<&Tag> {
        match &self.mark {
            Some(Mark::Weight(tag)) => Some(tag),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn mark(&self) -> Option<&Mark> {
        self.mark.as_ref()
    }

    /// The layer of a weight of which this rank has some rows, if this is those rows or their gradient.
    pub(crate) fn divided(&self) -> Option<&Arc<Layer>> {
        let layer = match &self.mark {
            Some(Mark::Weight(Tag { layer, .. }) | Mark::ShardGradient(layer)) => layer,
            _ => return None,
        };
        layer.sharding().filter(|sharding| sharding.is_divided()).map(|_| layer)
    }

    /// The result of an operation on marked tensors.
    #[inline]
    pub(crate) fn with_mark(mut self, mark: Option<Mark>) -> Self {
        self.mark = mark;
        self
    }

    /// The result of an operation that changes no value: everything stays.
    #[inline]
    pub(crate) fn map(self, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        Self { full: f(self.full), ..self }
    }

    /// The transpose of `of`, whose mark it keeps.
    pub(crate) fn transposed(full: FloatTensor<B>, of: Self) -> Self {
        Self { mark: of.mark.clone(), transpose_of: Some(Box::new(of)), ..Self::new(full) }
    }

    pub(crate) fn transpose_of(&self) -> Option<&Self> {
        self.transpose_of.as_deref()
    }

    /// [`transpose_of`](Self::transpose_of), the very clone that this was made from.
    pub(crate) fn into_transpose_of(self) -> Option<Self> {
        self.transpose_of.map(|of| *of)
    }

    /// Whether this is the weight of a linear, tagged or not.
    pub(crate) fn is_weight(&self) -> bool {
        self.mark.is_some() || self.known_cache().is_some_and(|cache| cache.is_weight())
    }

    pub(crate) fn cache(&self) -> &Fp8Cache<B> {
        self.handle.shared().cache.get_or_init(Box::default)
    }

    /// The cache of a tensor that a linear has read.
    pub(crate) fn known_cache(&self) -> Option<&Fp8Cache<B>> {
        self.handle.shared().cache.get().map(|cache| &**cache)
    }

    /// Upgrades as long as a clone of the tensor lives.
    fn liveness(&self) -> Weak<dyn Send + Sync> {
        let shared: Arc<dyn Send + Sync> = self.handle.shared().clone();
        Arc::downgrade(&shared)
    }

    /// The clones that Autodiff has just saved of x and w, the arguments of an operation, if it did.
    pub(crate) fn saved_clones(x: &Self, w: &Self) -> [Option<SavedClone>; 2] {
        Handle::saved_of(&x.handle, &w.handle)
    }

    /// Notes an fprop of so many rows that reads this weight, of which Autodiff has saved that clone for dgrad.
    pub(crate) fn add_forward(&self, saved: SavedClone, rows: usize, is_autocast_off: bool) {
        let forwards = &mut self.cache().lock().forwards;
        // Some may be of graphs that were dropped. Long lists are looked through when they have doubled.
        if forwards.len() < 64 || forwards.len().is_power_of_two() {
            forwards.retain(|forward| self.handle.is_alive(forward.saved) || self.handle.is_walked(forward.saved));
        }
        self.handle.add_saved(saved);
        forwards.push(Forward { saved, rows, is_autocast_off });
    }

    /// Whether fprops of this weight are remembered.
    pub(crate) fn has_forwards(&self) -> bool {
        self.known_cache().is_some_and(|cache| !cache.lock().forwards.is_empty())
    }

    /// Whether this is what backward is given of a weight whose dgrad is to come, of so many rows if that is known.
    pub(crate) fn is_before_dgrad(&self, rows: Option<usize>) -> bool {
        self.known_cache().is_some_and(|cache| self.find_forward(&cache.lock().forwards, rows).is_some())
    }

    /// Whether FP8 was switched off in the fprop that belongs to a dgrad of so many rows, which is given this weight.
    pub(crate) fn take_autocast_off(&self, rows: usize) -> bool {
        let forwards = &mut self.cache().lock().forwards;
        self.find_forward(forwards, Some(rows)).is_some_and(|at| {
            let forward = forwards.remove(at);
            self.handle.remove_saved(forward.saved);
            forward.is_autocast_off
        })
    }

    /// The last fprop of the graph that backward walks, if this is what it is given of the weight.
    fn find_forward(&self, forwards: &[Forward], rows: Option<usize>) -> Option<usize> {
        let fits = |forward: &Forward| rows.is_none_or(|rows| forward.rows == rows);
        forwards.iter().rposition(|forward| fits(forward) && self.is_of_graph(forward.saved))
    }

    /// Whether the graph that backward walks has saved that clone, if this is what it is given of the tensor: the first clone that
    /// the graph has saved of it, which another operation may have saved.
    fn is_of_graph(&self, saved: SavedClone) -> bool {
        self.handle.is_clone_of(saved) || self.handle.is_walked(saved)
    }

    /// Notes that a linear reads this tensor. An evaluation by the layer, or by an average of the model, takes nothing from a use
    /// whose weight gradient is still to come.
    pub(crate) fn add_use(&self, new: LinearUse<B>) {
        self.cache().with_uses(|uses| {
            let waits =
                |used: &LinearUse<B>| used.pending && used.saved.is_some_and(|saved| self.handle.is_alive(saved));
            match uses.iter().position(|known| known.is_same(&new) && !waits(known)) {
                Some(known) => uses[known] = new,
                None if new.saved.is_none() && uses.iter().any(|known| known.is_same(&new)) => {}
                None => uses.push(new),
            }
        });
    }

    /// The use that backward has come to, of those that fit, if it is given this x: one of the graph that backward walks, the last
    /// first.
    pub(crate) fn find_use(&self, uses: &[LinearUse<B>], fits: impl Fn(&LinearUse<B>) -> bool) -> Option<usize> {
        let last = |of_graph: &dyn Fn(SavedClone) -> bool| {
            uses.iter().rposition(|used| used.pending && fits(used) && used.saved.is_some_and(of_graph))
        };
        let found = last(&|saved| self.is_of_graph(saved))?;
        // Of several uses by one layer, such as one whose graph was dropped.
        let given = last(&|saved| self.handle.is_clone_of(saved)).filter(|given| uses[*given].is_same(&uses[found]));
        given.or(Some(found))
    }
}

impl<B: Float8Backend> Clone for Float8Tensor<B> {
    #[inline]
    fn clone(&self) -> Self {
        Self {
            full: self.full.clone(),
            mark: self.mark.clone(),
            handle: self.handle.clone(),
            transpose_of: self.transpose_of.clone(),
        }
    }
}

impl<B: Float8Backend> core::fmt::Debug for Float8Tensor<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.full.fmt(f)
    }
}

impl<B: Float8Backend> TensorMetadata for Float8Tensor<B> {
    fn dtype(&self) -> DType {
        self.full.dtype()
    }

    fn shape(&self) -> Shape {
        self.full.shape()
    }

    fn rank(&self) -> usize {
        self.full.rank()
    }
}
