//! Sharded weight as the source of its layer's operands, and its ranks.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::{
    CastAmax, PeerExchange, ShardHooks, ShardLayout, ShardingReport, WeightCache, WeightCast, operation,
};

use crate::config::Reshard;
use crate::gather_cache::GatherCache;
use crate::prefetch::Prefetch;
use crate::sharding::Sharding;

impl<B: Float8Backend> ShardHooks<B> for Sharding<B> {
    fn layout(&self) -> ShardLayout {
        let (rows, count) = (self.rows(), |count: &AtomicU64| count.load(Relaxed));
        let report = ShardingReport {
            rows: [rows.start, rows.end],
            k: self.logical[0],
            float8_gathers: count(&self.float8_gathers),
            float8_gathers_ahead: count(&self.gathers_ahead),
            high_precision_gathers: count(&self.full_gathers),
        };
        ShardLayout {
            shape: self.logical,
            own_shape: self.own_shape(),
            is_divided: self.is_divided(),
            keeps: self.config.reshard == Reshard::AfterStep,
            report,
        }
    }

    fn operand(&self, cast: &WeightCast<'_, B>, cache: &mut WeightCache) -> (B::Operand, CastAmax<B>) {
        let gathered = cache.get::<GatherCache<B>>().gather(self, cast);
        let next = Prefetch::of(cast).next(cast.layer().name(), cast.is_transposed());
        let Some((weight, is_transposed)) = next else { return gathered };
        let Some(sharding) = Self::of(weight.layer()) else { return gathered };
        let Some(next) = weight.casts().find(|cast| cast.is_transposed() == is_transposed) else { return gathered };
        // Of the other orientation of this weight, the cache is locked already.
        let is_started = match weight.is_read_by(cast) {
            true => cache.get::<GatherCache<B>>().start(&sharding, &next),
            false => weight.try_cache().is_some_and(|mut cache| cache.get::<GatherCache<B>>().start(&sharding, &next)),
        };
        if is_started && sharding.is_divided() {
            sharding.gathers_ahead.fetch_add(1, Relaxed);
        }
        gathered
    }

    fn values(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        self.gather_values(rows)
    }

    fn gradient(&self, whole: FloatTensor<B>) -> FloatTensor<B> {
        let _timer = operation("reduce_scatter");
        self.reduce_scatter_when_synced(whole)
    }
}

impl<B: Float8Backend> PeerExchange<B> for Sharding<B> {
    fn max(&self, label: &str, amaxes: FloatTensor<B>) -> FloatTensor<B> {
        self.world.all.max(label, amaxes).unwrap_or_else(|error| panic!("{error}"))
    }

    fn exchange(&self, label: &str, own: &[u8]) -> Vec<Vec<u8>> {
        self.world.all.comm.all_gather_bytes(label, own).unwrap_or_else(|error| panic!("{error}"))
    }
}
