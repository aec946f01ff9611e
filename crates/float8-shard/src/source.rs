//! Sharded weight as the source of its layer's operands.
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::report::ShardingReport;
use burn_float8::shard_hooks::operation;
use burn_float8::source::{CastAmax, ShardedWeight, WeightCache, WeightCast};

use crate::ahead::Ahead;
use crate::config::Reshard;
use crate::kept::Kept;
use crate::sharding::Sharding;

impl<B: Float8Backend> ShardedWeight<B> for Sharding<B> {
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
        self.config.reshard == Reshard::AfterStep
    }

    fn operand(&self, cast: &WeightCast<'_, B>, cache: &mut WeightCache) -> (B::Operand, CastAmax<B>) {
        cache.get::<Kept<B>>().gather(self, cast)
    }

    fn after_operand(&self, cast: &WeightCast<'_, B>) {
        let next = Ahead::of(cast).next(cast.layer().name(), cast.is_transposed());
        let Some((weight, is_transposed)) = next else { return };
        let Some(sharding) = Self::of(weight.layer()) else { return };
        let next = weight.casts().find(|cast| cast.is_transposed() == is_transposed);
        if next.is_some_and(|cast| weight.cache().get::<Kept<B>>().start(&sharding, &cast)) {
            sharding.gathers_ahead.fetch_add(1, Relaxed);
        }
    }

    fn forget_delayed(&self, cache: &mut WeightCache) {
        cache.get::<Kept<B>>().forget_delayed();
    }

    fn values(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        self.gather_values(rows)
    }

    fn gradient(&self, whole: FloatTensor<B>) -> FloatTensor<B> {
        let _timer = operation("reduce_scatter");
        self.reduce_scatter_when_synced(whole)
    }

    fn report(&self) -> ShardingReport {
        let (rows, count) = (self.rows(), |count: &AtomicU64| count.load(Relaxed));
        ShardingReport {
            rows: [rows.start, rows.end],
            k: self.logical[0],
            float8_gathers: count(&self.float8_gathers),
            float8_gathers_ahead: count(&self.gathers_ahead),
            high_precision_gathers: count(&self.full_gathers),
        }
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
