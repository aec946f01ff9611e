//! Gradient clipping by the norm over all parameters, on the device.
//!
//! ```text
//! norm = √ Σ_p Σ_i g_{p,i}²        g ← g · min(1, max_norm / (norm + 1e-6))
//! ```
//! as `torch.nn.utils.clip_grad_norm_`. Burn's own clipping looks at one parameter at a time.

use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use float8_shard::CommError;

use crate::Ranks;

/// Scales `grads` of `module` to a global norm of at most `max_norm` (infinity: leaves them alone) and returns the
/// norm that they had, `[1]` in f32. Nothing is read back from the device, unless the module is sharded over `ranks`.
///
/// # Errors
/// [`CommError`].
pub fn clip_grad_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    grads: &mut GradientsParams,
    max_norm: f64,
    ranks: Option<&Ranks>,
    device: &B::Device,
) -> Result<Tensor<B::InnerBackend, 1>, CommError> {
    let mut squares = Squares::<B> { grads, ranks, sums: Vec::new(), shards: Vec::new() };
    module.visit(&mut squares);
    let Squares { mut sums, shards, .. } = squares;
    if let (Some(ranks), [_, ..]) = (ranks, &shards[..]) {
        // Each rank has its own rows; what all have whole counts once.
        let own = Tensor::cat(shards, 0).sum().into_data().iter::<f32>().collect();
        let all = ranks.sum("squares of the gradients", own)?;
        sums.push(Tensor::from_data(TensorData::new(all, [1]), (device, DType::F32)));
    }
    let norm = match sums {
        sums if sums.is_empty() => Tensor::zeros([1], (device, DType::F32)),
        sums => Tensor::cat(sums, 0).sum().sqrt(),
    };
    if max_norm.is_finite() {
        let factor = (norm.clone() + 1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
        module.visit(&mut Scale::<B> { grads, factor, backend: PhantomData });
    }
    Ok(norm)
}

struct Squares<'a, B: AutodiffBackend> {
    grads: &'a GradientsParams,
    ranks: Option<&'a Ranks>,
    /// One `[1]` per parameter.
    sums: Vec<Tensor<B::InnerBackend, 1>>,
    /// The squares of parameters of which each rank has some rows.
    shards: Vec<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
            let sum = grad.cast(DType::F32).square().sum();
            let is_shard = self.ranks.is_some_and(|ranks| ranks.has_shard(param.id));
            if is_shard { self.shards.push(sum) } else { self.sums.push(sum) }
        }
    }
}

struct Scale<'a, B: AutodiffBackend> {
    grads: &'a mut GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) {
            let factor = self.factor.clone().cast(grad.dtype()).reshape([1; D]);
            self.grads.register(param.id, grad * factor);
        }
    }
}
