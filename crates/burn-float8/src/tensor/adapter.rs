//! [`Adapter`]: the two low-rank matrices that LoRA adds to a frozen weight.
//!
//! ```text
//! y = x · w + scale · (drop(x) · a) · b        a [K, r], b [r, N], scale = α / r
//! ```
//!
//! If ranks divide the linear, each has all of a and b, and reads its rows of a or its columns of b.
//! Ranks exchange `x · a`, which has r columns: they gather its tokens, or sum its terms.
//!
//! Source: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models* (2021), section 4.1.
use burn::module::ParamId;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorData, TensorMetadata};
use burn_std::Slice;
use float8_kernels::check::split_mix;
use rayon::prelude::*;

use super::expert_route::Direction;
use super::linear_part::{LinearPart, ParallelStyle};
use crate::backend::in_dtype;

/// Adapters of a weight, in the order of their sum.
#[derive(Clone, Debug)]
pub(crate) struct Adapters<B: Backend>(Vec<Adapter<B>>);

impl<B: Backend> Adapters<B> {
    /// Adds an adapter, or replaces the one with its id.
    pub(crate) fn with(attached: Option<&Self>, adapter: Adapter<B>) -> Self {
        let mut all = attached.map_or_else(Vec::new, |attached| attached.0.clone());
        match all.iter_mut().find(|other| other.id == adapter.id) {
            Some(other) => *other = adapter,
            None => all.push(adapter),
        }
        Self(all)
    }

    /// Adapters on another backend, or at another autodiff node.
    pub(crate) fn map<C: Backend>(&self, f: impl Fn(FloatTensor<B>) -> FloatTensor<C>) -> Adapters<C> {
        Adapters(self.0.iter().map(|adapter| adapter.map(&f)).collect())
    }

    /// Adds the output of each adapter for `x: [.., K]` to `y` `[.., N]` of a linear, or of its part on this
    /// rank. `exchange` gathers tokens of all ranks, or sums over ranks; see
    /// [`Wrapped::parallel_tokens`](super::Wrapped::parallel_tokens).
    pub(crate) fn add_to(
        &self,
        y: FloatTensor<B>,
        x: FloatTensor<B>,
        part: Option<LinearPart>,
        exchange: impl Fn(FloatTensor<B>, Direction) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        self.0.iter().fold(y, |y, adapter| B::float_add(y, adapter.apply(x.clone(), part, &exchange)))
    }

    /// Weight `[K, N]`, or this rank's part of it, with the adapters added, in its dtype: the same y without
    /// dropout.
    pub(crate) fn merged(&self, weight: FloatTensor<B>, part: Option<LinearPart>) -> FloatTensor<B> {
        self.0.iter().fold(weight, |weight, adapter| adapter.merged(weight, part))
    }
}

/// A LoRA adapter of one weight; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Adapter<B: Backend> {
    /// Id of the parameter A.
    pub(crate) id: ParamId,
    /// `[K, r]`
    pub(crate) a: FloatTensor<B>,
    /// `[r, N]`
    pub(crate) b: FloatTensor<B>,
    /// α / r
    pub(crate) scale: f64,
    /// Set only in training.
    pub(crate) dropout: Option<Dropout>,
}

/// Dropout of an adapter's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dropout {
    /// Dropped share, from 0 to below 1.
    pub(crate) probability: f64,
    /// Seed of a layer and forward. The same seed drops the same elements.
    pub(crate) seed: u64,
}

impl<B: Backend> Adapter<B> {
    /// Adapter on another backend, or at another autodiff node.
    pub(crate) fn map<C: Backend>(&self, f: impl Fn(FloatTensor<B>) -> FloatTensor<C>) -> Adapter<C> {
        let Self { id, a, b, scale, dropout } = self;
        Adapter { id: *id, a: f(a.clone()), b: f(b.clone()), scale: *scale, dropout: *dropout }
    }

    /// Output added to y `[.., N]` for `x: [.., K]`, in x's dtype.
    fn apply(
        &self,
        x: FloatTensor<B>,
        part: Option<LinearPart>,
        exchange: impl Fn(FloatTensor<B>, Direction) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let dtype = x.dtype();
        let x = match self.dropout {
            Some(dropout) => {
                let (shape, elements) = (x.shape(), x.shape().num_elements());
                let cols = shape[shape.num_dims() - 1];
                let place = part.map_or(MaskPlace::WHOLE, |LinearPart { style, ranks, rank }| match style {
                    ParallelStyle::Colwise => MaskPlace { first: rank * elements, ..MaskPlace::WHOLE },
                    ParallelStyle::Rowwise => MaskPlace { first: rank * cols, cols, width: ranks * cols },
                });
                let mask = TensorData::new(dropout.mask(elements, place), shape);
                let mask = in_dtype::<B>(B::float_from_data(mask, &B::float_device(&x)), dtype);
                B::float_mul(x, mask)
            }
            None => x,
        };
        let [a, b] = self.of_part(part).map(|t| in_dtype::<B>(t, dtype));
        let inner = B::linear(x, a, None);
        let inner = match part.map(|part| part.style) {
            Some(ParallelStyle::Colwise) => exchange(inner, Direction::Dispatch),
            Some(ParallelStyle::Rowwise) => exchange(inner, Direction::Combine),
            None => inner,
        };
        B::float_mul_scalar(B::linear(inner, b, None), Scalar::Float(self.scale))
    }

    /// A and B; for a part of a linear, its rows of A or its columns of B.
    fn of_part(&self, part: Option<LinearPart>) -> [FloatTensor<B>; 2] {
        let [a, b] = [&self.a, &self.b].map(Clone::clone);
        let Some(part) = part else { return [a, b] };
        let own = |len: usize| Slice::from(part.range(len));
        let [k, rank, n] = [a.shape()[0], a.shape()[1], b.shape()[1]];
        match part.style {
            ParallelStyle::Colwise => [a, B::float_slice(b, &[Slice::from(0..rank), own(n)])],
            ParallelStyle::Rowwise => [B::float_slice(a, &[own(k), Slice::from(0..rank)]), b],
        }
    }

    fn merged(&self, weight: FloatTensor<B>, part: Option<LinearPart>) -> FloatTensor<B> {
        let [a, b] = self.of_part(part);
        let update = B::float_mul_scalar(B::float_matmul(a, b), Scalar::Float(self.scale));
        let update = in_dtype::<B>(update, weight.dtype());
        B::float_add(weight, update)
    }
}

/// Elements of this rank in a whole matrix, row by row.
#[derive(Clone, Copy)]
struct MaskPlace {
    /// Index of the first one.
    first: usize,
    /// Columns here.
    cols: usize,
    /// Columns of the whole.
    width: usize,
}

impl MaskPlace {
    const WHOLE: Self = Self { first: 0, cols: 1, width: 1 };

    fn index(self, own: usize) -> usize {
        self.first + own / self.cols * self.width + own % self.cols
    }
}

/// Elements drawn per task.
const TASK: usize = 1 << 14;

impl Dropout {
    /// Mask with 0 for dropped elements and `1 / (1 - probability)` for others. Element `i` is
    /// dropped if SplitMix64 of the seed and its index in the whole is below the probability.
    fn mask(self, len: usize, place: MaskPlace) -> Vec<f32> {
        let kept = (1.0 / (1.0 - self.probability)) as f32;
        // Threshold out of 2^64, so that a probability of 0 drops nothing.
        let threshold = (self.probability * 2f64.powi(64)) as u64;
        let mut mask = vec![0.0; len];
        mask.par_chunks_mut(TASK).enumerate().for_each(|(task, part)| {
            for (i, element) in part.iter_mut().enumerate() {
                *element =
                    if split_mix(self.seed, place.index(task * TASK + i) as u64) < threshold { 0.0 } else { kept };
            }
        });
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_keeps_its_share_and_its_mean() {
        let dropout = Dropout { probability: 0.25, seed: 7 };
        let mask = dropout.mask(100_000, MaskPlace::WHOLE);
        let dropped = mask.iter().filter(|x| **x == 0.0).count();
        assert!((24_500..25_500).contains(&dropped), "{dropped}");
        assert!(mask.iter().all(|x| [0.0, 4.0 / 3.0].contains(x)));
        assert_eq!(mask, dropout.mask(100_000, MaskPlace::WHOLE));
        // A rank drops the elements of its columns that one process drops.
        let part = dropout.mask(50_000, MaskPlace { first: 5, cols: 5, width: 10 });
        let columns: Vec<f32> = mask.chunks(10).flat_map(|row| &row[5..]).copied().collect();
        assert_eq!(part, columns);
        assert_ne!(mask, Dropout { seed: 8, ..dropout }.mask(100_000, MaskPlace::WHOLE));
        assert!(Dropout { probability: 0.0, seed: 7 }.mask(1000, MaskPlace::WHOLE).iter().all(|x| *x == 1.0));
    }
}
