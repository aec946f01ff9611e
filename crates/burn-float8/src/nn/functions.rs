//! The functions of each backend that wraps a `Float8`, found by the backend's type, so that a model that is generic over the
//! backend can call them.
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::LazyLock;

use burn_backend::Backend;
use burn_backend::tensor::{FloatTensor, IntTensor};
use parking_lot::RwLock;

use crate::ops::Float8;
use crate::stack::Float8Stack;

type LinearFn<B> = fn(FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) -> FloatTensor<B>;
type GroupedFn<B> = fn(FloatTensor<B>, FloatTensor<B>, IntTensor<B>) -> FloatTensor<B>;

/// Those of one backend.
pub(super) struct Functions<B: Backend> {
    pub(super) linear: LinearFn<B>,
    pub(super) grouped_linear: GroupedFn<B>,
}

type Known = HashMap<TypeId, Box<dyn Any + Send + Sync>>;
static KNOWN: LazyLock<RwLock<Known>> = LazyLock::new(RwLock::default);

/// Makes the functions of `B` known, and those of the backend of its `valid()` models.
pub(crate) fn register<B: Float8Stack>() {
    fn insert<B: Float8Stack>() {
        let functions = Functions::<B> { linear: B::linear_saved, grouped_linear: B::grouped_linear };
        KNOWN.write().entry(TypeId::of::<B>()).or_insert_with(|| Box::new(functions));
    }
    insert::<B>();
    insert::<Float8<B::Inner>>();
}

pub(super) fn find<B: Backend>() -> Option<Functions<B>> {
    let known = KNOWN.read();
    let functions = known.get(&TypeId::of::<B>())?.downcast_ref::<Functions<B>>()?;
    Some(Functions { linear: functions.linear, grouped_linear: functions.grouped_linear })
}
