//! A sharded weight as the source of its layer's operands.
use std::any::Any;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::report::ShardingReport;
use burn_float8::seam::operation;
use burn_float8::source::{Findings, Slot, WeightCast, WeightSource};

use crate::ahead::Ahead;
use crate::kept::Kept;
use crate::sharding::Sharding;

impl<B: Float8Backend> WeightSource<B> for Sharding<B> {
    fn shape(&self) -> [usize; 2] {
        self.logical
    }

    fn own_shape(&self) -> [usize; 2] {
        Sharding::own_shape(self)
    }

    fn is_divided(&self) -> bool {
        self.ranks() > 1
    }

    fn keeps(&self) -> bool {
        self.keeps_gathered()
    }

    fn operand(&self, cast: &WeightCast<'_, B>, slot: &mut Slot) -> (B::Operand, Findings<B>) {
        slot.get::<Kept<B>>().gather(self, cast)
    }

    fn after_operand(&self, cast: &WeightCast<'_, B>) {
        let next = Ahead::of(cast).next(cast.layer().name(), cast.is_transposed());
        let Some((weight, is_transposed)) = next else { return };
        let Some(sharding) = Self::of(weight.layer()) else { return };
        let next = weight.casts().find(|cast| cast.is_transposed() == is_transposed);
        if next.is_some_and(|cast| weight.slot().get::<Kept<B>>().start(&sharding, &cast)) {
            sharding.count_ahead();
        }
    }

    fn forget_delayed(&self, slot: &mut Slot) {
        slot.get::<Kept<B>>().forget_delayed();
    }

    fn values(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        self.gather_values(rows)
    }

    fn gradient(&self, whole: FloatTensor<B>) -> FloatTensor<B> {
        let _timer = operation("reduce_scatter");
        self.reduce_scatter(whole)
    }

    fn report(&self) -> ShardingReport {
        Sharding::report(self)
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
