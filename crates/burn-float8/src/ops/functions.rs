//! What a model calls by name, of each backend that is or wraps a `Float8`, found by the backend's type: a model that is
//! generic over the backend names no other bound.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::LazyLock;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};
use parking_lot::RwLock;

use super::{Float8, full_tensor, grouped, linear, linear_saved};
use crate::backend::Float8Backend;

type LinearFn<B> = fn(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>;
type FullTensorFn<B> = fn(FloatTensor<B>) -> FloatTensor<B>;
type GroupedFn<B> = fn(FloatTensor<B>, FloatTensor<B>, IntTensor<B>) -> FloatTensor<B>;

/// Those of one backend.
pub(crate) struct Functions<B: Backend> {
    /// Of x, w and bias.
    pub(crate) linear: LinearFn<B>,
    /// Of x, w and ends.
    pub(crate) grouped_linear: GroupedFn<B>,
    /// Of a weight.
    pub(crate) full_tensor: FullTensorFn<B>,
}

impl<B: Backend> Clone for Functions<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Functions<B> {}

type Registry = HashMap<TypeId, Box<dyn Any + Send + Sync>>;
static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(RwLock::default);

pub(crate) fn register<B: Backend>(functions: Functions<B>) {
    REGISTRY.write().entry(TypeId::of::<B>()).or_insert_with(|| Box::new(functions));
}

/// Registers `Float8<B>` and the backends that wrap it. All operations that make a tensor of none call this, so it comes before a
/// model has parameters.
pub(super) fn register_wrappers<B: Float8Backend>() {
    if REGISTRY.read().contains_key(&TypeId::of::<Float8<B>>()) {
        return;
    }
    fn autodiff<B: Float8Backend, C: CheckpointStrategy>() {
        register(Functions::<Autodiff<Float8<B>, C>> {
            linear: linear_saved::forward_autodiff::<B, C>,
            grouped_linear: grouped::forward_autodiff::<B, C>,
            full_tensor: full_tensor::forward_autodiff::<B, C>,
        });
    }
    autodiff::<B, NoCheckpointing>();
    autodiff::<B, BalancedCheckpointing>();
    register(Functions::<Float8<B>> {
        linear: linear::forward,
        grouped_linear: grouped::forward,
        full_tensor: full_tensor::forward,
    });
}

/// None if `B` has no FP8.
pub(crate) fn find<B: Backend>() -> Option<Functions<B>> {
    REGISTRY.read().get(&TypeId::of::<B>())?.downcast_ref().copied()
}
