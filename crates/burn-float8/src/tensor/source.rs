//! [`WeightSource`]: where the whole of a weight comes from of which this process has some rows.
//!
//! A layer may have one. Its linears then take from it what they would have made of the weight itself: the operand of a GEMM, the
//! values that high precision reads, and the gradient of the rows.
use std::any::Any;
use std::ops::DerefMut;
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, DeviceOps, TensorMetadata};
use burn_std::Shape;
use float8_kernels::{Cast, Granularity};
use serde::{Deserialize, Serialize};

use super::cache::{CastResult, CopyKey, Fp8Copy, Held, Layout, Slot};
use super::cast::{CastRequest, quantize};
use super::wrapped::{Float8Tensor, Wrapped};
use crate::backend::{Float8Backend, Quantized, ScaleFrom, in_dtype};
use crate::config::LinearPlan;
use crate::layer::{Layer, Mark, Tag};
use crate::step::DeviceState;
use crate::terms::{ContractionAxis, Operand, Role};

/// Where the whole of a weight `[K, N]` comes from of which this process has some rows, zeros below them included.
pub trait WeightSource<B: Float8Backend>: Send + Sync + 'static {
    /// K and N of the whole.
    fn shape(&self) -> [usize; 2];

    /// The shape of what this process has.
    fn own_shape(&self) -> [usize; 2];

    /// Whether this process lacks some rows.
    fn is_divided(&self) -> bool;

    /// Whether what comes of a weight lives as long as that, for the next GEMM that reads it.
    fn keeps(&self) -> bool;

    /// The operand of the whole in one orientation, and what the cast of the rows found out. One at a time is asked for with the same
    /// slot.
    fn operand(&self, cast: &WeightCast<'_, B>, slot: &mut Slot) -> (B::Operand, Findings<B>);

    /// An operand that was asked for is there: what will be asked for next may be started.
    fn after_operand(&self, cast: &WeightCast<'_, B>);

    /// The optimizer step changes: what was started with the scale of a history is not to be used.
    fn forget_delayed(&self, slot: &mut Slot);

    /// The whole in high precision, in the dtype of the rows.
    fn values(&self, rows: FloatTensor<B>) -> FloatTensor<B>;

    /// The rows of the sum over all processes of a gradient `[K, N]`.
    fn gradient(&self, whole: FloatTensor<B>) -> FloatTensor<B>;

    /// For the layer's report.
    fn report(&self) -> ShardingReport;

    /// The source by its own type.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// A weight of which each process keeps some rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardingReport {
    /// The first row that this process keeps, and the first that it does not.
    pub rows: [usize; 2],
    /// Rows of the whole weight.
    pub k: usize,
    /// Gathers of FP8 codes from all processes.
    pub float8_gathers: u64,
    /// Gathers in FP8 that ran while other layers computed.
    pub float8_gathers_ahead: u64,
    /// Gathers of values, in the dtype of x.
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

/// What a cast of this process' rows found out, to be given back with the operand of the whole.
pub struct Findings<B: Float8Backend>(Arc<CastResult<B>>);

/// The source of a layer's weight, if it has one.
pub(crate) fn source_of<B: Float8Backend>(layer: &Layer) -> Option<&Arc<dyn WeightSource<B>>> {
    layer.source().map(|source| source.downcast_ref().expect("all weights of a layer are of one backend"))
}

/// One cast of a weight that has a source.
pub struct WeightCast<'a, B: Float8Backend> {
    weight: &'a Float8Tensor<B>,
    request: CastRequest<'a>,
}

impl<B: Float8Backend> WeightCast<'_, B> {
    /// The rows that this process has.
    pub fn rows(&self) -> FloatTensor<B> {
        self.weight.full().clone()
    }

    /// Where they are.
    pub fn device(&self) -> Device<B> {
        B::float_device(self.weight.full())
    }

    /// Whose weight it is.
    pub fn layer(&self) -> &Arc<Layer> {
        self.request.layer
    }

    /// How it is cast.
    pub fn cast(&self) -> Cast {
        self.request.key().cast
    }

    /// Whether the operand is `[N, K]`, which contracts K, and not `[K, N]`.
    pub fn is_transposed(&self) -> bool {
        self.request.operand.axis == ContractionAxis::Leading
    }

    /// Whether each scale is that of a column, of which every process has a part.
    pub fn scales_columns(&self) -> bool {
        self.is_transposed() && self.cast().granularity == Granularity::Row
    }

    /// Whether a history gives the scale.
    pub fn is_delayed(&self) -> bool {
        self.request.key().delayed.is_some()
    }

    /// Whether the one scale of the cast is known: another copy has it, or a history gives it.
    pub fn is_scale_known(&self) -> bool {
        let CastRequest { layer, .. } = self.request;
        let key = self.request.key();
        let has_history = || {
            let state = DeviceState::<B>::of(layer, &self.device());
            key.delayed.is_some_and(|history| state.scaling_amax(layer, Role::Weight, history.scaling).is_some())
        };
        self.weight.cache().lock().known(key).is_some() || has_history()
    }

    /// Whether the operand of the whole is there.
    pub fn is_held(&self) -> bool {
        self.weight.cache().lock().find(self.request.copy_key()).is_some()
    }

    /// Casts rows with the scale that other copies have, else that of the history, else that of `amax`, `[1]` in f32, else each part
    /// with its own.
    pub fn quantize(
        &self,
        rows: FloatTensor<B>,
        amax: Option<&dyn Fn() -> FloatTensor<B>>,
    ) -> (B::Operand, Findings<B>) {
        let CastRequest { operand, layer, .. } = self.request;
        let (key, cache) = (self.request.key(), self.weight.cache());
        layer.count_cast(operand.role);
        let known = cache.lock().known(key);
        let own = amax.map(|amax| || ScaleFrom::Amax { amax: amax(), observe: false });
        let own = own.as_ref().map(|own| own as &dyn Fn() -> _);
        let (Quantized { rows, cols, .. }, result) = quantize(&self.device(), self.request, known, own, |scale| {
            B::fp8_quantize(rows, key.cast, operand.axis.orientation(), scale)
        });
        let result = cache.lock().keep(key, result);
        (rows.or(cols).expect("the orientation that was asked for"), Findings(result))
    }
}

/// A weight with a source that may be read in FP8.
pub struct SourcedWeight<B: Float8Backend> {
    weight: Float8Tensor<B>,
    layer: Arc<Layer>,
    plan: Arc<LinearPlan>,
}

impl<B: Float8Backend> SourcedWeight<B> {
    /// None if it has no source, or is not to be read in FP8.
    pub(crate) fn new(weight: Float8Tensor<B>, Tag { layer, enabled, .. }: Tag) -> Option<Self> {
        let is_read = enabled && layer.has_source();
        let plan = layer.plan(None).ok().filter(|_| is_read)?;
        Some(Self { weight, layer, plan })
    }

    /// Whose weight it is.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    /// Its casts: that of `[N, K]`, then that of `[K, N]`.
    pub fn casts(&self) -> impl Iterator<Item = WeightCast<'_, B>> {
        let Self { weight, layer, plan } = self;
        let operands = [Operand::WEIGHT_T, Operand::WEIGHT].into_iter().filter(|operand| plan.cast(*operand).is_some());
        operands.map(|operand| WeightCast {
            weight,
            request: CastRequest { operand, layer, plan, both: false, evaluates: false },
        })
    }

    /// What its source keeps with it.
    pub fn slot(&self) -> impl DerefMut<Target = Slot> {
        parking_lot::MutexGuard::map(self.weight.cache().sourced(), |sourced| &mut sourced.slot)
    }

    /// What the layers of its conversion share on its device, by its type.
    pub fn shared<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        shared(&self.layer, &B::float_device(self.weight.full()))
    }
}

/// What the layers of a conversion share on a device, by its type.
pub fn shared<T: Any + Default + Send + Sync>(layer: &Layer, device: &impl DeviceOps) -> Arc<T> {
    layer.conversion().state(device.id())
}

impl<W: Wrapped> Float8Tensor<W> {
    /// The shape of the whole weight, of which this may be some rows.
    pub(crate) fn whole_shape(&self) -> Shape {
        match self.layer().and_then(|layer| source_of::<W::Plain>(layer)) {
            Some(source) => Shape::from(source.shape().to_vec()),
            None => self.shape(),
        }
    }

    /// The layer of a weight of which this process has some rows, if this is those rows or their gradient.
    pub(crate) fn divided(&self) -> Option<&Arc<Layer>> {
        let layer = match self.mark() {
            Some(Mark::Weight(Tag { layer, .. }) | Mark::ShardGradient(layer)) => layer,
            _ => return None,
        };
        source_of::<W::Plain>(layer).filter(|source| source.is_divided()).map(|_| layer)
    }
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// The values of the whole weight in a dtype.
    pub(crate) fn into_whole(self, dtype: DType) -> FloatTensor<B> {
        let source = self.layer().and_then(|layer| source_of::<B>(layer)).cloned();
        let Some(source) = source else { return in_dtype::<B>(self.into_values("linear"), dtype) };
        if !source.keeps() {
            return source.values(in_dtype::<B>(self.into_full(), dtype));
        }
        let mut sourced = self.cache().sourced();
        if let Some(known) = sourced.values.iter().find(|known| known.dtype() == dtype) {
            return known.clone();
        }
        let whole = source.values(in_dtype::<B>(self.full().clone(), dtype));
        sourced.values.push(whole.clone());
        whole
    }

    /// Forgets what casts with delayed scaling have made: a step begins that has other scales.
    pub(crate) fn forget_delayed(&self) {
        let Some(cache) = self.known_cache() else { return };
        if let Some(source) = self.layer().and_then(|layer| source_of::<B>(layer)) {
            source.forget_delayed(&mut cache.sourced().slot);
        }
        cache.forget_delayed();
    }
}

impl<'a> CastRequest<'a> {
    /// The source of a weight, if it has one.
    pub(super) fn source<B: Float8Backend>(&self) -> Option<&'a Arc<dyn WeightSource<B>>> {
        if self.operand.role == Role::Weight { source_of(self.layer) } else { None }
    }

    fn copy_key(&self) -> CopyKey {
        CopyKey { cast: self.key(), layout: Layout::Matrix, operand: self.operand }
    }
}

/// The copy of a weight that its source makes.
pub(super) fn sourced_copy<B: Float8Backend>(
    weight: &Float8Tensor<B>,
    request: CastRequest<'_>,
    source: &Arc<dyn WeightSource<B>>,
) -> Arc<Fp8Copy<B>> {
    let (cast, key) = (WeightCast { weight, request }, request.copy_key());
    // Held until the copy is kept: each is made once.
    let mut sourced = weight.cache().sourced();
    if let Some(copy) = weight.cache().lock().find(key) {
        return copy;
    }
    let (whole, Findings(result)) = source.operand(&cast, &mut sourced.slot);
    let copy = Fp8Copy::new(whole, key.cast.cast, result, request.layer);
    let held = match source.keeps() && !request.is_transient() {
        true => Held::Strong(copy.clone()),
        false => Held::Weak(Arc::downgrade(&copy)),
    };
    weight.cache().lock().copies.push((key, held));
    drop(sourced);
    source.after_operand(&cast);
    copy
}

/// Whether this process' rows alone say nothing of the scales of a cast of the whole.
pub(super) fn needs_other_rows<B: Float8Backend>(weight: &Float8Tensor<B>, request: CastRequest<'_>) -> bool {
    WeightCast { weight, request }.scales_columns()
}
