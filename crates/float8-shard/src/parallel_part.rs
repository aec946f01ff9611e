//! [`Part`]: a linear's part on this rank, and its collectives.
use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_float8::Float8Tensor;
use burn_float8::backend::Float8Backend;
use burn_float8::report::Layer;
use burn_float8::shard_hooks::{self, Axis, CastAmax, LinearPart, ParallelHooks, ParallelStyle, WeightCast, matrix};
use burn_std::Slice;
use float8_kernels::Granularity;

use crate::collectives::ShardedAxis;
use crate::config::{ReduceDtype, ShardConfig};
use crate::sharding::{Sharding, alignment_of};
use crate::values::{column_amaxes, tensor_amax, with_amaxes};
use crate::world::World;

/// Part of a linear on this rank.
pub(crate) struct Part<B: Float8Backend> {
    pub(crate) world: Arc<World<B>>,
    pub(crate) name: String,
    pub(crate) style: ParallelStyle,
}

impl<B: Float8Backend> Part<B> {
    /// Partition of the rows of a matrix of all ranks, whose values are exchanged in a dtype.
    fn rows(&self, shape: [usize; 2], dtype: DType) -> Sharding<B> {
        let reduce_dtype = if dtype == DType::BF16 { ReduceDtype::Bf16 } else { ReduceDtype::F32 };
        let config = ShardConfig { reduce_dtype, ..ShardConfig::default() };
        Sharding::new(self.world.clone(), &self.name, shape, 1, config)
    }

    /// This rank's part of a whole parameter, which is divided along an axis. Returns a part, or
    /// rows of a part's matrix, unchanged. `Sharded` alone checks the number of rows.
    ///
    /// Panics, as Burn does, for any other shape.
    pub(crate) fn own(&self, value: FloatTensor<B>, whole: &[usize], axis: usize) -> FloatTensor<B> {
        if self.is_part(&value.shape(), whole, axis) {
            return value;
        }
        self.cut(value, whole, axis)
    }

    fn cut(&self, value: FloatTensor<B>, whole: &[usize], axis: usize) -> FloatTensor<B> {
        let mut slices: Vec<_> = whole.iter().map(|len| Slice::from(0..*len)).collect();
        slices[axis] = Slice::from(self.part().range(whole[axis]));
        B::float_slice(value, &slices)
    }

    /// Whether a value is a part, or rows of a part's matrix, and not the whole. Panics for any other shape.
    fn is_part(&self, shape: &[usize], whole: &[usize], axis: usize) -> bool {
        let (name, ranks) = (&self.name, self.world.shard.size());
        let mut own = whole.to_vec();
        own[axis] /= ranks;
        if shape == own || shape != whole && shape.len() > 1 && shape[1..] == own[1..] {
            return true;
        }
        assert!(
            shape == whole,
            "{name}: {shape:?} was loaded, where the whole is {whole:?} and the part of each of {ranks} ranks {own:?}"
        );
        false
    }

    /// [`own`](Self::own) of a weight `[K, N]`, which may be FP8-only.
    pub(crate) fn own_weight(
        &self,
        layer: &Layer,
        weight: Float8Tensor<B>,
        whole: &[usize],
        axis: usize,
    ) -> Float8Tensor<B> {
        if self.is_part(&weight.shape(), whole, axis) {
            return weight;
        }
        let [rows, cols] = [0, 1].map(|of| if of == axis { self.part().range(whole[of]) } else { 0..whole[of] });
        let len = rows.len();
        let codes = shard_hooks::part_of_codes(layer, &weight, rows, cols, len);
        codes.unwrap_or_else(|| Float8Tensor::new(self.cut(weight.into_full(), whole, axis)))
    }

    /// Panics, as Burn does for shapes, if a part ends inside of a block of the cast.
    fn check_part(&self, cast: &WeightCast<'_, B>, [rows, cols]: [usize; 2]) {
        let align = alignment_of(cast.cast().granularity);
        let (len, of) = match self.style.divided(cast.role()) {
            Axis::Rows => (rows, "rows"),
            Axis::Cols => (cols, "columns"),
        };
        assert!(
            len.is_multiple_of(align),
            "{}: a rank's {len} {of} of its {} are no multiple of {align}",
            self.name,
            cast.role().name()
        );
    }
}

impl<B: Float8Backend> ParallelHooks<B> for Part<B> {
    fn part(&self) -> LinearPart {
        let shard = &self.world.shard;
        LinearPart { style: self.style, ranks: shard.size(), rank: shard.comm.rank() }
    }

    fn cast(&self, cast: &WeightCast<'_, B>) -> (B::Operand, CastAmax<B>) {
        let part = matrix::<B>(cast.rows());
        self.check_part(cast, part.shape().dims());
        let max =
            |amaxes| self.world.shard.max(&self.name, amaxes).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        if cast.divides_rows() {
            let (axis, lines) = match cast.is_transposed() {
                true => (0, part.clone()),
                false => (1, B::float_transpose(part.clone())),
            };
            let len = part.shape()[axis];
            let amaxes = max(column_amaxes::<B>(lines));
            let (operand, amax) = cast.quantize(with_amaxes::<B>(part, amaxes, axis, 1), None);
            return ((self.world.cropped)(&operand, len, &cast.device()), amax);
        }
        let own = || max(tensor_amax::<B>(part.clone()));
        let has_one_scale = cast.cast().granularity == Granularity::Tensor;
        cast.quantize(part.clone(), if has_one_scale { Some(&own) } else { None })
    }

    fn gather(&self, part: &B::Operand, tokens: Axis, device: &Device<B>) -> B::Operand {
        let size = B::fp8_size(part);
        let (own, across, axis) = match tokens {
            Axis::Rows => (size.rows, size.k, ShardedAxis::Rows),
            Axis::Cols => (size.k, size.rows, ShardedAxis::Contraction),
        };
        let sharding = self.rows([own * self.world.shard.size(), across], DType::F32);
        let gathering = sharding.start_gather(part, axis, device);
        sharding.finish_gather(gathering, device)
    }

    fn gather_rows(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let [own, cols] = [rows.shape()[0], rows.shape()[1]];
        self.rows([own * self.world.shard.size(), cols], rows.dtype()).gather_values(rows)
    }

    fn reduce_rows(&self, all: FloatTensor<B>) -> FloatTensor<B> {
        let sharding = self.rows([all.shape()[0], all.shape()[1]], all.dtype());
        let sum = sharding.start_reduce_scatter(all).and_then(|started| started());
        sum.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}
