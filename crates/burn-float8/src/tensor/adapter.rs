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
use std::sync::Arc;

use burn::module::ParamId;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorData, TensorMetadata};
use burn_std::Slice;
use float8_kernels::check::split_mix;
use rayon::prelude::*;

use super::expert_route::Direction;
use super::parallel::{ParallelHooks, ParallelStyle, parallel_of};
use super::wrapped::Wrapped;
use crate::backend::in_dtype;
use crate::layer::Layer;

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
}

impl<W: Wrapped> Adapters<W> {
    /// Adds the output of each adapter for `x: [.., K]` to `y` `[.., N]` of a layer's linear.
    pub(crate) fn add_to(&self, y: FloatTensor<W>, x: FloatTensor<W>, layer: Option<&Arc<Layer>>) -> FloatTensor<W> {
        self.0.iter().fold(y, |y, adapter| W::float_add(y, adapter.apply(x.clone(), layer)))
    }

    /// Weight `[K, N]` of a layer, or this rank's part of it, with the adapters added, in its dtype: the
    /// same y without dropout.
    pub(crate) fn merged(&self, weight: FloatTensor<W>, layer: Option<&Arc<Layer>>) -> FloatTensor<W> {
        self.0.iter().fold(weight, |weight, adapter| adapter.merged(weight, layer))
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
}

impl<W: Wrapped> Adapter<W> {
    /// Output added to y `[.., N]` of a layer for `x: [.., K]`, in x's dtype.
    fn apply(&self, x: FloatTensor<W>, layer: Option<&Arc<Layer>>) -> FloatTensor<W> {
        let dtype = x.dtype();
        let part = layer.and_then(|layer| Some((layer, parallel_of::<W::Plain>(layer)?)));
        let x = match self.dropout {
            Some(dropout) => {
                let (shape, elements) = (x.shape(), x.shape().num_elements());
                let cols = shape[shape.num_dims() - 1];
                let place = part.map_or(Place::WHOLE, |(_, hooks)| {
                    let (ranks, rank) = (hooks.ranks(), hooks.rank());
                    match hooks.style() {
                        ParallelStyle::Colwise => Place { first: rank * elements, ..Place::WHOLE },
                        ParallelStyle::Rowwise => Place { first: rank * cols, cols, width: ranks * cols },
                    }
                });
                let mask = TensorData::new(dropout.mask(elements, place), shape);
                let mask = in_dtype::<W>(W::float_from_data(mask, &W::float_device(&x)), dtype);
                W::float_mul(x, mask)
            }
            None => x,
        };
        let [a, b] = self.of_part(part.map(|(_, hooks)| &**hooks)).map(|t| in_dtype::<W>(t, dtype));
        let inner = W::linear(x, a, None);
        let inner = match part {
            Some((layer, hooks)) => W::parallel_tokens(
                inner,
                layer,
                match hooks.style() {
                    ParallelStyle::Colwise => Direction::Dispatch,
                    ParallelStyle::Rowwise => Direction::Combine,
                },
            ),
            None => inner,
        };
        W::float_mul_scalar(W::linear(inner, b, None), Scalar::Float(self.scale))
    }

    /// A and B; for a part of a linear, its rows of A or its columns of B.
    fn of_part(&self, part: Option<&dyn ParallelHooks<W::Plain>>) -> [FloatTensor<W>; 2] {
        let [a, b] = [&self.a, &self.b].map(Clone::clone);
        let Some(hooks) = part else { return [a, b] };
        let own = |len: usize| {
            let own = len / hooks.ranks();
            Slice::from(hooks.rank() * own..(hooks.rank() + 1) * own)
        };
        let [k, rank, n] = [a.shape()[0], a.shape()[1], b.shape()[1]];
        match hooks.style() {
            ParallelStyle::Colwise => [a, W::float_slice(b, &[Slice::from(0..rank), own(n)])],
            ParallelStyle::Rowwise => [W::float_slice(a, &[own(k), Slice::from(0..rank)]), b],
        }
    }

    fn merged(&self, weight: FloatTensor<W>, layer: Option<&Arc<Layer>>) -> FloatTensor<W> {
        let [a, b] = self.of_part(layer.and_then(|layer| parallel_of(layer)).map(|hooks| &**hooks));
        let update = W::float_mul_scalar(W::float_matmul(a, b), Scalar::Float(self.scale));
        let update = in_dtype::<W>(update, weight.dtype());
        W::float_add(weight, update)
    }
}

/// Elements of this rank in a whole matrix, row by row.
#[derive(Clone, Copy)]
struct Place {
    /// Index of the first one.
    first: usize,
    /// Columns here.
    cols: usize,
    /// Columns of the whole.
    width: usize,
}

impl Place {
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
    fn mask(self, len: usize, place: Place) -> Vec<f32> {
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
        let mask = dropout.mask(100_000, Place::WHOLE);
        let dropped = mask.iter().filter(|x| **x == 0.0).count();
        assert!((24_500..25_500).contains(&dropped), "{dropped}");
        assert!(mask.iter().all(|x| [0.0, 4.0 / 3.0].contains(x)));
        assert_eq!(mask, dropout.mask(100_000, Place::WHOLE));
        // A rank drops the elements of its columns that one process drops.
        let part = dropout.mask(50_000, Place { first: 5, cols: 5, width: 10 });
        let columns: Vec<f32> = mask.chunks(10).flat_map(|row| &row[5..]).copied().collect();
        assert_eq!(part, columns);
        assert_ne!(mask, Dropout { seed: 8, ..dropout }.mask(100_000, Place::WHOLE));
        assert!(Dropout { probability: 0.0, seed: 7 }.mask(1000, Place::WHOLE).iter().all(|x| *x == 1.0));
    }
}
