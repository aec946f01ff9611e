//! [`GatherCache`]: cached state of one value of a sharded weight: amaxes of all ranks and operands in
//! flight.
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::{Float8Backend, in_dtype};
use burn_float8::shard_hooks::{CastAmax, SourcedWeight, WeightCast};
use burn_std::Shape;
use float8_kernels::{Cast, Granularity};

use crate::collectives::ShardedAxis;
use crate::operand::Gathering;
use crate::sharding::Sharding;
use crate::values::{column_amaxes, tensor_amax};

/// Cached state; see the module.
pub(crate) struct GatherCache<B: Float8Backend> {
    /// Amaxes of the whole weight, f32.
    pub(crate) amaxes: Vec<(AmaxOf, FloatTensor<B>)>,
    started: Vec<Started<B>>,
}

/// Range of an amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AmaxOf {
    /// All elements: `[1]`.
    Tensor,
    /// Each column: `[N]`.
    Columns,
}

/// Operand whose gather is in flight.
struct Started<B: Float8Backend> {
    key: Key,
    gathering: Gathering<B>,
    amax: CastAmax<B>,
}

/// Distinguishes operands of one weight.
#[derive(Clone, Copy, PartialEq)]
struct Key {
    cast: Cast,
    is_transposed: bool,
    is_delayed: bool,
}

impl<B: Float8Backend> Default for GatherCache<B> {
    fn default() -> Self {
        Self { amaxes: vec![], started: vec![] }
    }
}

impl Key {
    fn of<B: Float8Backend>(cast: &WeightCast<'_, B>) -> Self {
        Self { cast: cast.cast(), is_transposed: cast.is_transposed(), is_delayed: cast.is_delayed() }
    }
}

impl AmaxOf {
    fn own<B: Float8Backend>(self, rows: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Tensor => tensor_amax::<B>(rows),
            Self::Columns => column_amaxes::<B>(rows),
        }
    }
}

impl<B: Float8Backend> GatherCache<B> {
    /// Operand of a cast, gathered from all ranks' casts of their rows. Uses a gather that was
    /// started earlier.
    pub(crate) fn gather(&mut self, sharding: &Sharding<B>, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>) {
        let key = Key::of(cast);
        let started = self.started.extract_if(.., |started| started.key == key).next();
        let Started { gathering, amax, .. } = started.unwrap_or_else(|| self.cast_and_start(sharding, cast));
        (sharding.finish_gather(gathering, &cast.device()), amax)
    }

    /// Starts the gather of an operand before it is needed. Returns false if it already exists.
    pub(crate) fn start(&mut self, sharding: &Sharding<B>, cast: &WeightCast<'_, B>) -> bool {
        let key = Key::of(cast);
        if cast.is_held() || self.started.iter().any(|started| started.key == key) {
            return false;
        }
        let started = self.cast_and_start(sharding, cast);
        self.started.push(started);
        true
    }

    /// Drops operands in flight.
    pub(crate) fn forget_started(&mut self) {
        self.started.clear();
    }

    /// Casts this rank's rows and starts the gather.
    fn cast_and_start(&self, sharding: &Sharding<B>, cast: &WeightCast<'_, B>) -> Started<B> {
        let amax = |of: AmaxOf| {
            let known = self.amaxes.iter().find(|(known, _)| *known == of).map(|(_, amax)| amax.clone());
            known.unwrap_or_else(|| sharding.reduce_amax(of.own::<B>(cast.rows())))
        };
        let own = || amax(AmaxOf::Tensor);
        let rows = match cast.scales_columns() {
            // One extra row with the amax of each column, so that its scale covers the whole
            // column.
            true => {
                let rows = cast.rows();
                let columns = B::float_reshape(amax(AmaxOf::Columns), Shape::from(vec![1, rows.shape()[1]]));
                let columns = in_dtype::<B>(columns, rows.dtype());
                B::float_cat(vec![rows, columns], 0)
            }
            false => cast.rows(),
        };
        let has_one_scale = cast.cast().granularity == Granularity::Tensor;
        let (shard, amax) = cast.quantize(rows, if has_one_scale { Some(&own) } else { None });
        let axis = ShardedAxis::of(cast.is_transposed());
        Started { key: Key::of(cast), gathering: sharding.start_gather(&shard, axis, &cast.device()), amax }
    }
}

/// Amaxes of this rank's rows that a weight's casts need from all ranks and that are not yet known.
pub(crate) fn amaxes_to_reduce<B: Float8Backend>(weight: &SourcedWeight<B>) -> Vec<(AmaxOf, FloatTensor<B>)> {
    let mut cache = weight.cache();
    let kept: &mut GatherCache<B> = cache.get();
    let mut wanted: Vec<(AmaxOf, FloatTensor<B>)> = vec![];
    for cast in weight.casts() {
        let of = match () {
            _ if cast.scales_columns() => AmaxOf::Columns,
            _ if cast.cast().granularity == Granularity::Tensor && !cast.is_scale_known() => AmaxOf::Tensor,
            _ => continue,
        };
        if !kept.amaxes.iter().chain(&wanted).any(|(known, _)| *known == of) {
            wanted.push((of, of.own::<B>(cast.rows())));
        }
    }
    wanted
}
