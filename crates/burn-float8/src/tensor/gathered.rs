//! The whole of a sharded weight: its logical shape, its values, and the FP8 copies that GEMMs read, from all ranks.
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_std::Shape;

use super::cache::{AmaxOf, CopyKey, Entries, Fp8Copy, Held, Layout, Started};
use super::cast::{CastRequest, cast_key, quantize, reads_columns};
use super::wrapped::{Float8Tensor, Wrapped};
use crate::backend::{Float8Backend, Quantized, in_dtype};
use crate::config::LinearPlan;
use crate::layer::Layer;
use crate::sharding::{Amax, Sharding, column_amaxes, tensor_amax};
use crate::step::DeviceState;
use crate::terms::{Operand, Role};

impl<W: Wrapped> Float8Tensor<W> {
    /// The shape of the whole weight, of which this may be some rows.
    pub(crate) fn whole_shape(&self) -> Shape {
        match self.layer().and_then(|layer| layer.sharding()) {
            Some(sharding) => Shape::from(sharding.logical().to_vec()),
            None => self.shape(),
        }
    }
}

impl<B: Float8Backend> Float8Tensor<B> {
    /// The values of the whole weight in a dtype, which is the one that ranks exchange.
    pub(crate) fn into_whole(self, dtype: DType) -> FloatTensor<B> {
        let sharding = self.layer().and_then(|layer| layer.sharding()).cloned();
        let Some(sharding) = sharding else { return in_dtype::<B>(self.into_full(), dtype) };
        if !sharding.keeps_gathered() {
            return sharding.gather_values::<B>(in_dtype::<B>(self.into_full(), dtype));
        }
        let mut entries = self.cache().lock();
        if let Some(known) = entries.gathered.iter().find(|known| known.dtype() == dtype) {
            return known.clone();
        }
        let whole = sharding.gather_values::<B>(in_dtype::<B>(self.full().clone(), dtype));
        entries.gathered.push(whole.clone());
        whole
    }
}

/// Starts the gather of a copy that nobody has asked for yet, unless there is one; whether it did.
pub(super) fn start<B: Float8Backend>(t: &Float8Tensor<B>, request: CastRequest<'_>, sharding: &Sharding) -> bool {
    let key = request.copy_key();
    let mut entries = t.cache().lock();
    if entries.find(key).is_some() || entries.started.iter().any(|(started, _)| *started == key) {
        return false;
    }
    let started = entries.start_gather(t, request, sharding);
    entries.started.push((key, started));
    true
}

impl CastRequest<'_> {
    fn copy_key(&self) -> CopyKey {
        CopyKey { cast: self.key(), layout: Layout::Matrix, operand: self.operand }
    }
}

impl<B: Float8Backend> Entries<B> {
    /// The whole copy of a sharded weight, from all ranks' casts of their rows, whose gather may have been started.
    pub(super) fn gather(
        &mut self,
        t: &Float8Tensor<B>,
        request: CastRequest<'_>,
        sharding: &Sharding,
    ) -> Arc<Fp8Copy<B>> {
        let (CastRequest { layer, plan, .. }, key) = (request, request.copy_key());
        let started = self.started.extract_if(.., |(started, _)| *started == key).next().map(|(_, started)| started);
        let Started { gathering, result } = started.unwrap_or_else(|| self.start_gather(t, request, sharding));
        let whole = sharding.finish_gather::<B>(gathering, &B::float_device(t.full()));
        let copy = Fp8Copy::new(whole, key.cast.cast, result, layer);
        let held = match sharding.keeps_gathered() && !plan.recasts_weight {
            true => Held::Strong(copy.clone()),
            false => Held::Weak(Arc::downgrade(&copy)),
        };
        self.copies.push((key, held));
        copy
    }

    /// Casts this rank's rows and starts to gather the others'.
    fn start_gather(&mut self, t: &Float8Tensor<B>, request: CastRequest<'_>, sharding: &Sharding) -> Started<B> {
        let (CastRequest { operand, layer, .. }, cast) = (request, request.key());
        layer.count_cast(operand.role);
        let amax = |of| {
            let known = self.reduced.iter().find(|(known, _)| *known == of).map(|(_, amax)| amax.0.clone());
            move || known.clone().unwrap_or_else(|| sharding.reduce_amax(&own_amax(t, of)).0)
        };
        let (own, columns) = (amax(AmaxOf::Tensor), amax(AmaxOf::Columns));
        let rows = match reads_columns(cast, operand) {
            // One row more with the amax of each column: its scale is then that of the whole column.
            true => {
                let columns = B::float_reshape(columns(), Shape::from(vec![1, t.shape()[1]]));
                B::float_cat(vec![t.full().clone(), in_dtype::<B>(columns, t.dtype())], 0)
            }
            false => t.full().clone(),
        };
        let own_amax: Option<&dyn Fn() -> FloatTensor<B>> = if cast.has_one_scale() { Some(&own) } else { None };
        let orientation = operand.axis.orientation();
        let (Quantized { rows, cols, .. }, result) = quantize(rows, orientation, request, self.known(cast), own_amax);
        let result = self.keep(cast, result);
        let shard = rows.or(cols).expect("the orientation that was asked for");
        Started { gathering: sharding.start_gather::<B>(&shard, operand.axis, &B::float_device(t.full())), result }
    }
}

fn own_amax<B: Float8Backend>(t: &Float8Tensor<B>, of: AmaxOf) -> Amax<B> {
    match of {
        AmaxOf::Tensor => tensor_amax(t.full().clone()),
        AmaxOf::Columns => column_amaxes(t.full().clone()),
    }
}

/// The amaxes of this rank's rows that the casts of a sharded weight need from all ranks, and do not have yet.
pub(crate) fn amaxes_to_reduce<B: Float8Backend>(
    t: &Float8Tensor<B>,
    layer: &Layer,
    plan: &LinearPlan,
) -> Vec<(AmaxOf, Amax<B>)> {
    let entries = t.cache().lock();
    let mut wanted = vec![];
    for operand in [Operand::WEIGHT_T, Operand::WEIGHT] {
        let Some(cast) = plan.cast(operand) else { continue };
        let key = cast_key(layer, cast);
        let has_history = || {
            let state = DeviceState::<B>::of(layer, &B::float_device(t.full()));
            let scaling_amax = |scaling| state.lock().histories.scaling_amax(layer.name(), Role::Weight, scaling);
            cast.delayed.is_some_and(|scaling| scaling_amax(scaling).is_some())
        };
        let of = match () {
            _ if reads_columns(key, operand) => AmaxOf::Columns,
            _ if key.has_one_scale() && entries.result(key).is_none() && !has_history() => AmaxOf::Tensor,
            _ => continue,
        };
        let is_known =
            entries.reduced.iter().map(|(known, _)| *known).chain(wanted.iter().copied()).any(|known| known == of);
        if !is_known {
            wanted.push(of);
        }
    }
    drop(entries);
    wanted.into_iter().map(|of| (of, own_amax(t, of))).collect()
}
