//! [`Adapter`]: the two low-rank matrices that LoRA adds to a frozen weight.
//!
//! ```text
//! y = x · w + scale · (drop(x) · a) · b        a [K, r], b [r, N], scale = α / r
//! ```
//!
//! Source: Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models* (2021), section 4.1.
use burn::module::ParamId;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar, TensorData, TensorMetadata};
use float8_kernels::check::split_mix;
use rayon::prelude::*;

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

    /// Adds the output of each adapter for `x: [.., K]` to a linear's `y` `[.., N]`.
    pub(crate) fn add_to(&self, y: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
        self.0.iter().fold(y, |y, adapter| B::float_add(y, adapter.apply(x.clone())))
    }

    /// Weight `[K, N]` with the adapters added, in its dtype: the same y without dropout.
    pub(crate) fn merged(&self, weight: FloatTensor<B>) -> FloatTensor<B> {
        self.0.iter().fold(weight, |weight, adapter| adapter.merged(weight))
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
    fn apply(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = x.dtype();
        let x = match self.dropout {
            Some(dropout) => {
                let mask = TensorData::new(dropout.mask(x.shape().num_elements()), x.shape());
                let mask = in_dtype::<B>(B::float_from_data(mask, &B::float_device(&x)), dtype);
                B::float_mul(x, mask)
            }
            None => x,
        };
        let [a, b] = [&self.a, &self.b].map(|t| in_dtype::<B>(t.clone(), dtype));
        B::float_mul_scalar(B::linear(B::linear(x, a, None), b, None), Scalar::Float(self.scale))
    }

    fn merged(&self, weight: FloatTensor<B>) -> FloatTensor<B> {
        let product = B::float_matmul(self.a.clone(), self.b.clone());
        let update = B::float_mul_scalar(product, Scalar::Float(self.scale));
        let update = in_dtype::<B>(update, weight.dtype());
        B::float_add(weight, update)
    }
}

/// Elements drawn per task.
const TASK: usize = 1 << 14;

impl Dropout {
    /// Mask with 0 for dropped elements and `1 / (1 - probability)` for others. Element `i` is
    /// dropped if SplitMix64 of the seed and `i` is below the probability.
    fn mask(self, len: usize) -> Vec<f32> {
        let kept = (1.0 / (1.0 - self.probability)) as f32;
        // Threshold out of 2^64, so that a probability of 0 drops nothing.
        let threshold = (self.probability * 2f64.powi(64)) as u64;
        let mut mask = vec![0.0; len];
        mask.par_chunks_mut(TASK).enumerate().for_each(|(task, part)| {
            for (i, element) in part.iter_mut().enumerate() {
                *element = if split_mix(self.seed, (task * TASK + i) as u64) < threshold { 0.0 } else { kept };
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
        let mask = dropout.mask(100_000);
        let dropped = mask.iter().filter(|x| **x == 0.0).count();
        assert!((24_500..25_500).contains(&dropped), "{dropped}");
        assert!(mask.iter().all(|x| [0.0, 4.0 / 3.0].contains(x)));
        assert_eq!(mask, dropout.mask(100_000));
        assert_ne!(mask, Dropout { seed: 8, ..dropout }.mask(100_000));
        assert!(Dropout { probability: 0.0, seed: 7 }.mask(1000).iter().all(|x| *x == 1.0));
    }
}
