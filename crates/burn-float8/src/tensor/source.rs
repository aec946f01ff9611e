//! [`ShardHooks`]: gathers a sharded weight from all processes.
//!
//! If a layer has a source, its linears take GEMM operands and high-precision values from it. The
//! source also reduces the gradient to the rows of this process.
use std::any::Any;
use std::ops::DerefMut;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, DeviceOps, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Cast, Granularity};
use serde::{Deserialize, Serialize};

use super::cache::{CastResult, Fp8Copy, Held, WeightCache};
use super::cast::CastRequest;
use super::wrapped::{Float8Tensor, Wrapped};
use crate::backend::{Float8Backend, GivenAmax, in_dtype};
use crate::layer::{Layer, LinearPlan, Mark, Tag};
use crate::profile::{Work, time};
use crate::step::PeerExchange;
use crate::terms::{ContractionAxis, Operand, Role};

/// Rows of a weight `[K, N]` on this rank. All ranks call these in the same order.
pub trait ShardHooks<B: Float8Backend>: PeerExchange<B> + Any {
    /// Rows of this process, and counts for the report.
    fn layout(&self) -> ShardLayout;

    /// Operand of the whole weight in one orientation, and the amax of the cast of the rows. Calls
    /// with the same cache do not run concurrently.
    fn operand(&self, cast: &WeightCast<'_, B>, cache: &mut WeightCache) -> (B::Operand, CastAmax<B>);

    /// The whole weight in high precision, in the dtype of the rows.
    fn values(&self, rows: FloatTensor<B>) -> FloatTensor<B>;

    /// This process' rows of a gradient `[K, N]`, summed over all ranks.
    fn gradient(&self, whole: FloatTensor<B>) -> FloatTensor<B>;
}

/// Rows of a sharded weight on this process.
pub struct ShardLayout {
    /// K and N of the whole weight.
    pub shape: [usize; 2],
    /// Shape of this process' rows, including zero padding below them.
    pub own_shape: [usize; 2],
    /// Whether this process lacks some rows.
    pub is_divided: bool,
    /// Whether a weight keeps its gathered operands and values for the next GEMM that reads it.
    pub keeps: bool,
    /// Counts for the report.
    pub report: ShardingReport,
}

/// Sharding of a weight: each process keeps some of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardingReport {
    /// First row of this process, and the row after its last.
    pub rows: [usize; 2],
    /// Rows of the whole weight.
    pub k: usize,
    /// Gathers of FP8 codes from all processes.
    pub float8_gathers: u64,
    /// Gathers in FP8 that ran while other layers computed.
    pub float8_gathers_ahead: u64,
    /// Gathers of high-precision values, in the dtype of x.
    pub high_precision_gathers: u64,
}

impl core::fmt::Display for ShardingReport {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { rows: [begin, end], k, float8_gathers, float8_gathers_ahead, high_precision_gathers } = self;
        write!(f, "rows {begin}..{end} of {k}, gathered {float8_gathers} times in FP8")?;
        if *float8_gathers_ahead > 0 {
            write!(f, " ({float8_gathers_ahead} ahead)")?;
        }
        if *high_precision_gathers > 0 {
            write!(f, ", {high_precision_gathers} in high precision")?;
        }
        Ok(())
    }
}

/// Amax of a cast of this process' rows, returned with the operand of the whole weight.
pub struct CastAmax<B: Float8Backend>(pub(super) Arc<CastResult<B>>);

/// Source of a layer's weight, if it has one.
pub(crate) fn source_of<B: Float8Backend>(layer: &Layer) -> Option<&Arc<dyn ShardHooks<B>>> {
    layer.source().map(|source| source.downcast_ref().expect("all weights of a layer are of one backend"))
}

/// One cast of this rank's part of a tensor: a shard, or x, w or dy of a linear that ranks divide.
pub struct WeightCast<'a, B: Float8Backend> {
    request: CastRequest<'a, B>,
}

impl<'a, B: Float8Backend> WeightCast<'a, B> {
    pub(super) const fn new(request: CastRequest<'a, B>) -> Self {
        Self { request }
    }

    /// This process' rows, decoded if the weight is FP8-only.
    pub fn rows(&self) -> FloatTensor<B> {
        self.request.tensor.clone().into_values("cast")
    }

    /// Operand of this process' rows and the amax of the whole weight, if it is FP8-only and its codes
    /// have the format and scales of this cast.
    pub fn codes(&self) -> Option<(B::Operand, CastAmax<B>)> {
        let codes = self.request.tensor.codes()?;
        let operand = codes.operand_of(self.cast(), self.request.operand.axis)?;
        Some((operand, CastAmax(codes.result())))
    }

    /// Whether there are [`codes`](Self::codes).
    pub fn has_codes(&self) -> bool {
        self.request.tensor.codes().is_some_and(|codes| codes.serves(self.cast(), self.request.operand.axis))
    }

    /// The matrix to cast.
    pub fn matrix(&self) -> FloatTensor<B> {
        self.request.matrix()
    }

    /// Role of the tensor in its linear.
    pub fn role(&self) -> Role {
        self.request.operand.role
    }

    /// Device of the rows.
    pub fn device(&self) -> Device<B> {
        B::float_device(self.request.tensor.full())
    }

    /// Layer of the weight.
    pub fn layer(&self) -> &Arc<Layer> {
        self.request.layer
    }

    /// Kernel settings of the cast.
    pub fn cast(&self) -> Cast {
        self.request.key().cast.cast
    }

    /// Whether the operand is `[N, K]`, with K contracted, instead of `[K, N]`.
    pub fn is_transposed(&self) -> bool {
        self.request.operand.axis == ContractionAxis::Leading
    }

    /// Whether the scale of a row covers elements of several ranks.
    pub fn divides_rows(&self) -> bool {
        self.request.divides_rows()
    }

    /// Whether each column has a scale. Every process has a part of each column.
    pub fn scales_columns(&self) -> bool {
        self.is_transposed() && self.cast().granularity == Granularity::Row
    }

    /// Whether a history sets the scale.
    pub fn is_delayed(&self) -> bool {
        self.request.key().cast.delayed.is_some()
    }

    /// Whether the single scale of the cast is known from another copy or a history.
    pub fn is_scale_known(&self) -> bool {
        let known = self.request.tensor.cache().lock().known(self.request.key().cast);
        self.request.scale(known).given.is_some()
    }

    /// Whether the operand of the whole weight exists.
    pub fn is_held(&self) -> bool {
        self.request.tensor.cache().lock().find(self.request.key()).is_some()
    }

    /// Gives the cast the amax of the whole weight, `[1]` in f32, for its single scale.
    pub fn give_amax(&self, amax: FloatTensor<B>) {
        let (key, result) = (self.request.key().cast, self.request.scale(None).result(amax));
        self.request.tensor.cache().lock().keep(key, result);
    }

    /// Casts rows. The scale comes from other copies, else from the history, else from `amax`,
    /// `[1]` in f32. If there is none of these, each group of the granularity gets its own scale.
    pub fn quantize(
        &self,
        rows: FloatTensor<B>,
        amax: Option<&dyn Fn() -> FloatTensor<B>>,
    ) -> (B::Operand, CastAmax<B>) {
        let CastRequest { tensor, operand, layer, .. } = self.request;
        let key = self.request.key().cast;
        layer.count_cast(operand.role);
        let known = tensor.cache().lock().known(key);
        let mut scale = self.request.scale(known);
        let timer = time(Work::Cast { role: operand.role, format: key.cast.format });
        if let (None, Some(amax)) = (&scale.given, amax) {
            scale.given = Some(GivenAmax { amax: amax(), observe: false });
        }
        let orientation = operand.axis.orientation();
        let made = B::fp8_quantize(rows, key.cast, orientation, scale.given.clone());
        drop(timer);
        let result = tensor.cache().lock().keep(key, scale.result(made.amax.clone()));
        (made.only(), CastAmax(result))
    }
}

/// A weight that ranks divide and that may be read in FP8.
pub struct SourcedWeight<B: Float8Backend> {
    weight: Float8Tensor<B>,
    layer: Arc<Layer>,
    plan: Arc<LinearPlan>,
}

impl<B: Float8Backend> SourcedWeight<B> {
    /// None if no ranks divide the weight or it is not read in FP8.
    pub(crate) fn new(weight: Float8Tensor<B>, Tag { layer, enabled, .. }: Tag) -> Option<Self> {
        let is_read = enabled && layer.is_divided();
        let plan = layer.plan(None).ok().filter(|_| is_read)?;
        Some(Self { weight, layer, plan })
    }

    /// Layer of the weight.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    /// Casts to `[N, K]` and `[K, N]`, without disabled ones.
    pub fn casts(&self) -> impl Iterator<Item = WeightCast<'_, B>> {
        let Self { weight, layer, plan } = self;
        let operands = [Operand::WEIGHT_T, Operand::WEIGHT].into_iter().filter(|operand| plan.cast(*operand).is_some());
        operands.map(|operand| WeightCast::new(CastRequest::new(weight, operand, layer, plan)))
    }

    /// Data of its source.
    pub fn cache(&self) -> impl DerefMut<Target = WeightCache> {
        parking_lot::MutexGuard::map(self.weight.cache().sourced(), |sourced| &mut sourced.cache)
    }

    /// Data of its source, unless a cast has locked it.
    pub fn try_cache(&self) -> Option<impl DerefMut<Target = WeightCache>> {
        let sourced = self.weight.cache().try_sourced()?;
        Some(parking_lot::MutexGuard::map(sourced, |sourced| &mut sourced.cache))
    }

    /// Whether a cast reads this weight, with the cache that both then share.
    pub fn is_read_by(&self, cast: &WeightCast<'_, B>) -> bool {
        core::ptr::eq(self.weight.cache(), cast.request.tensor.cache())
    }

    /// Data of this type, shared by the layers of its applied configuration on its device.
    pub fn shared<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        shared(&self.layer, &B::float_device(self.weight.full()))
    }
}

/// Data of this type, shared by the layers of an applied configuration on a device.
pub fn shared<T: Any + Default + Send + Sync>(layer: &Layer, device: &impl DeviceOps) -> Arc<T> {
    layer.applied().state(device.id())
}

impl<W: Wrapped> Float8Tensor<W> {
    /// Shape of the whole weight, also for a shard.
    pub(crate) fn whole_shape(&self) -> Shape {
        match self.layer().and_then(|layer| source_of::<W::Plain>(layer)) {
            Some(source) => Shape::from(source.layout().shape.to_vec()),
            None => self.shape(),
        }
    }

    /// Layer of the divided weight, if this tensor is its shard, or the gradient of its shard or part.
    pub(crate) fn divided(&self) -> Option<&Arc<Layer>> {
        match self.mark() {
            Some(Mark::Weight(Tag { layer, .. })) => {
                source_of::<W::Plain>(layer).filter(|source| source.layout().is_divided).map(|_| layer)
            }
            Some(Mark::ShardGradient(layer)) => Some(layer),
            _ => None,
        }
    }
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// Values of the whole weight in a dtype.
    pub(crate) fn into_whole(self, dtype: DType) -> FloatTensor<B> {
        let source = self.layer().and_then(|layer| source_of::<B>(layer)).cloned();
        let Some(source) = source else { return in_dtype::<B>(self.into_values("linear"), dtype) };
        if !source.layout().keeps {
            return source.values(in_dtype::<B>(self.into_values("linear"), dtype));
        }
        let mut sourced = self.cache().sourced();
        if let Some(known) = sourced.values.iter().find(|known| known.dtype() == dtype) {
            return known.clone();
        }
        let whole = source.values(in_dtype::<B>(self.clone().into_values("linear"), dtype));
        sourced.values.push(whole.clone());
        whole
    }

    /// Drops gathers in flight, and copies and results of delayed scaling, because a step with other
    /// scales begins.
    pub(crate) fn forget_delayed(&self) {
        let Some(cache) = self.known_cache() else { return };
        cache.sourced().cache = WeightCache::default();
        cache.forget_delayed();
    }
}

impl<'a, B: Float8Backend> CastRequest<'a, B> {
    /// Source of a weight, if it has one.
    pub(super) fn source(&self) -> Option<&'a Arc<dyn ShardHooks<B>>> {
        if self.operand.role == Role::Weight { source_of(self.layer) } else { None }
    }
}

/// Copy of a weight from its source.
pub(super) fn sourced_copy<B: Float8Backend>(
    request: CastRequest<'_, B>,
    source: &Arc<dyn ShardHooks<B>>,
) -> Arc<Fp8Copy<B>> {
    let (cast, key, cache) = (WeightCast { request }, request.key(), request.tensor.cache());
    // Held until the copy is stored, so that each copy is made once.
    let mut sourced = cache.sourced();
    if let Some(copy) = cache.lock().find(key) {
        return copy;
    }
    let (whole, CastAmax(result)) = source.operand(&cast, &mut sourced.cache);
    let copy = Fp8Copy::new(whole, key.cast.cast, result, request.layer);
    let layout = source.layout();
    // An FP8-only weight that is not gathered keeps no second copy.
    let is_lasting = layout.is_divided || !request.tensor.is_fp8_only() || cast.is_transposed() && cast.has_codes();
    let held = match layout.keeps && is_lasting && !request.is_transient() {
        true => Held::Strong(copy.clone()),
        false => Held::Weak(Arc::downgrade(&copy)),
    };
    cache.lock().copies.push((key, held));
    copy
}
