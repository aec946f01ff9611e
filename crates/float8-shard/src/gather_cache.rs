//! [`GatherCache`]: cached state of one value of a sharded weight: amaxes of all ranks and operands in
//! flight.
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::{CastAmax, LinearPart, ParallelStyle, SourcedWeight, WeightCast};
use burn_std::{Shape, Slice};
use float8_kernels::{Cast, Granularity};

use crate::collectives::ShardedAxis;
use crate::operand::Gathering;
use crate::sharding::Sharding;
use crate::values::{column_amaxes, tensor_amax, with_amaxes};

/// Cached state; see the module.
#[derive(Default)]
pub(crate) struct GatherCache<B: Float8Backend> {
    /// Amaxes of the whole weight, f32.
    amaxes: Vec<(AmaxOf, FloatTensor<B>)>,
    started: Vec<Started<B>>,
}

/// Range of an amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AmaxOf {
    /// All elements: `[1]`.
    Tensor,
    /// Each column: `[N]` of all parts.
    Columns,
    /// Each row of all shards, whose columns are divided by tensor parallelism.
    Rows,
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

impl Key {
    fn of<B: Float8Backend>(cast: &WeightCast<'_, B>) -> Self {
        Self { cast: cast.cast(), is_transposed: cast.is_transposed(), is_delayed: cast.is_delayed() }
    }
}

impl AmaxOf {
    /// Amaxes that the scales of a cast need from other ranks.
    fn of_cast<B: Float8Backend>(cast: &WeightCast<'_, B>) -> Option<Self> {
        match cast.cast().granularity {
            Granularity::Tensor => Some(Self::Tensor),
            _ if cast.scales_columns() => Some(Self::Columns),
            _ => cast.divides_rows().then_some(Self::Rows),
        }
    }

    /// Range of this rank's amaxes, and the number of all. None if every rank has all.
    fn place<B: Float8Backend>(self, sharding: &Sharding<B>) -> Option<([Slice; 1], usize)> {
        let (rank, ranks, len) = match (self, sharding.part.as_ref().map(|hooks| hooks.part())) {
            (Self::Columns, Some(LinearPart { style: ParallelStyle::Colwise, ranks, rank })) => {
                (rank, ranks, sharding.logical[1])
            }
            (Self::Rows, _) => (sharding.world.shard.comm.rank(), sharding.ranks(), sharding.chunk),
            _ => return None,
        };
        Some(([Slice::from(rank * len..(rank + 1) * len)], ranks * len))
    }

    /// Amaxes of this rank's rows, at their place among the whole weight's; zeros elsewhere.
    fn own<B: Float8Backend>(self, sharding: &Sharding<B>, rows: FloatTensor<B>) -> FloatTensor<B> {
        let own = match self {
            Self::Tensor => tensor_amax::<B>(rows),
            Self::Columns => column_amaxes::<B>(rows),
            Self::Rows => column_amaxes::<B>(B::float_transpose(rows)),
        };
        let Some((place, all)) = self.place(sharding) else { return own };
        let zeros = B::float_zeros(Shape::from(vec![all]), &B::float_device(&own), own.dtype().into());
        B::float_slice_assign(zeros, &place, own)
    }

    /// Amaxes of this rank's rows or columns, from the whole weight's.
    fn part<B: Float8Backend>(self, sharding: &Sharding<B>, all: FloatTensor<B>) -> FloatTensor<B> {
        match self.place(sharding) {
            Some((place, _)) => B::float_slice(all, &place),
            None => all,
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
            of.part(sharding, known.unwrap_or_else(|| sharding.reduce_amax(of.own(sharding, cast.rows()))))
        };
        let (own, device) = (|| amax(AmaxOf::Tensor), cast.device());
        let of_rows = || match (AmaxOf::of_cast(cast), cast.rows()) {
            (Some(AmaxOf::Tensor), rows) => cast.quantize(rows, Some(&own)),
            (Some(AmaxOf::Columns), rows) => cast.quantize(with_amaxes::<B>(rows, amax(AmaxOf::Columns), 0, 1), None),
            (Some(AmaxOf::Rows), rows) => {
                let width = rows.shape()[1];
                let (shard, amax) = cast.quantize(with_amaxes::<B>(rows, amax(AmaxOf::Rows), 1, 1), None);
                ((sharding.world.cropped)(&shard, width, &device), amax)
            }
            (None, rows) => cast.quantize(rows, None),
        };
        let (shard, amax) = cast.codes().unwrap_or_else(of_rows);
        let axis = ShardedAxis::of(cast.is_transposed());
        Started { key: Key::of(cast), gathering: sharding.start_gather(&shard, axis, &device), amax }
    }
}

/// Amaxes of this rank's rows or experts that a weight's casts need from all ranks and that are not yet
/// known.
pub(crate) fn amaxes_to_reduce<B: Float8Backend>(weight: &SourcedWeight<B>) -> Vec<(AmaxOf, FloatTensor<B>)> {
    let Some(sharding) = Sharding::<B>::of(weight.layer()) else { return vec![] };
    let mut cache = weight.cache();
    let kept: &mut GatherCache<B> = cache.get();
    let mut wanted: Vec<(AmaxOf, FloatTensor<B>)> = vec![];
    for cast in weight.casts().filter(|cast| !cast.has_codes()) {
        let is_unknown = |of: &AmaxOf| match of {
            // Histories of the next step are not known yet, and decide then.
            AmaxOf::Tensor => !(cast.is_scale_known() || sharding.has_experts() && cast.is_delayed()),
            // Each expert is whole.
            _ => !sharding.has_experts(),
        };
        let Some(of) = AmaxOf::of_cast(&cast).filter(is_unknown) else { continue };
        if !kept.amaxes.iter().chain(&wanted).any(|(known, _)| *known == of) {
            wanted.push((of, of.own(&sharding, cast.rows())));
        }
    }
    wanted
}

/// Keeps an amax of all ranks for the casts of a weight.
pub(crate) fn keep_amax<B: Float8Backend>(weight: &SourcedWeight<B>, of: AmaxOf, amax: FloatTensor<B>) {
    // Casts of experts are made without this cache.
    if Sharding::<B>::of(weight.layer()).is_some_and(|sharding| sharding.has_experts()) {
        let casts = weight.casts().filter(|cast| AmaxOf::of_cast(cast) == Some(of) && !cast.is_delayed());
        return casts.for_each(|cast| cast.give_amax(amax.clone()));
    }
    weight.cache().get::<GatherCache<B>>().amaxes.push((of, amax));
}
