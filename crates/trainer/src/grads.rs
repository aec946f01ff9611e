//! Gradient clipping by the norm over all parameters, on the device.
//!
//! ```text
//! norm = √ Σ_p Σ_i g_{p,i}²        g ← g · min(1, grad_clip_norm / (norm + 1e-6))
//! ```
//! as `torch.nn.utils.clip_grad_norm_`. Burn's own clipping handles one parameter at a time.
//!
//! [`sum`] adds in a fixed order, so that a run can be resumed bit for bit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::marker::PhantomData;

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::shard_hooks::Path;
use float8_shard::ShardError;

use crate::Ranks;

/// From this number of elements on, burn-flex 0.21 adds chunks on several cores in a
/// nondeterministic order.
const FLEX_PARALLEL: usize = 4 << 20;
/// Elements of a bf16 gradient that are converted to f32 at a time.
const WIDENED: usize = 4 << 20;
/// Rows that [`sum`] adds at a time, one after another.
const ROWS: usize = 256;

/// Sum of all elements, `[1]`, in an order that depends only on their number.
///
/// ```text
/// sum(x) = x_0 + x_1 + ..                                              up to 256 elements
/// sum(x) = sum(column sums of x as 256 rows at most, what is left)     width of a row: a power of two
/// ```
/// Burn's own sum is not deterministic for many elements on `Flex`, nor with CubeCL if several
/// cubes share the work with atomics. Below 4 Mi elements on `Flex`, Burn's sum is deterministic
/// and used here.
pub fn sum<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let count = tensor.shape().num_elements();
    let is_flex = B::name(&tensor.device()).contains("flex");
    if is_flex && count < FLEX_PARALLEL { tensor.sum() } else { sum_by_columns(tensor.reshape([count])) }
}

fn sum_by_columns<B: Backend>(values: Tensor<B, 1>) -> Tensor<B, 1> {
    let count = values.dims()[0];
    let width = count.div_ceil(ROWS).next_power_of_two();
    let whole = count / width * width;
    let columns = values.clone().narrow(0, 0, whole).reshape([whole / width, width]).sum_dim(0).reshape([width]);
    match (width, count - whole) {
        (1, _) => columns,
        (_, 0) => sum_by_columns(columns),
        (_, left) => sum_by_columns(Tensor::cat(vec![columns, values.narrow(0, whole, left)], 0)),
    }
}

/// Sum of squares in f32, `[1]`. Narrower tensors are converted in pieces. Otherwise the f32 copy
/// of an embedding's gradient, and its square, would be the largest tensors of a step.
fn sum_of_squares<B: Backend, const D: usize>(grad: Tensor<B, D>) -> Tensor<B, 1> {
    let count = grad.shape().num_elements();
    if grad.dtype() == DType::F32 || count <= WIDENED {
        return sum(grad.cast(DType::F32).square());
    }
    let flat = grad.reshape([count]);
    let piece = |first: usize| flat.clone().narrow(0, first, WIDENED.min(count - first));
    let sums = (0..count).step_by(WIDENED).map(|first| sum(piece(first).cast(DType::F32).square())).collect();
    sum(Tensor::cat(sums, 0))
}

/// Scales `grads` of `module` to a global norm of at most `grad_clip_norm` (infinity disables it).
/// Returns the norm before, `[1]` in f32. Nothing is read back from the device, unless the module
/// is sharded over `ranks`.
///
/// # Errors
/// [`ShardError`].
pub fn clip_grad_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    grads: &mut GradientsParams,
    grad_clip_norm: f64,
    ranks: Option<&Ranks>,
    device: &B::Device,
) -> Result<Tensor<B::InnerBackend, 1>, ShardError> {
    let mut squares = Squares::default();
    squares.add(module, grads);
    let norm = squares.norm(ranks, device)?;
    if grad_clip_norm.is_finite() {
        let factor = (norm.clone() + 1e-6).recip().mul_scalar(grad_clip_norm).clamp_max(1.0);
        module.visit(&mut ScaleGradients::<B> { grads, factor, backend: PhantomData });
    }
    Ok(norm)
}

/// Sums of squares of gradients, by parameter, each with its place in the module.
pub(crate) struct Squares<B: AutodiffBackend>(HashMap<ParamId, (usize, Tensor<B::InnerBackend, 1>)>);

impl<B: AutodiffBackend> Default for Squares<B> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<B: AutodiffBackend> Squares<B> {
    /// Adds the squares of `grads`. Returns the path of a parameter that was already added, if any.
    pub(crate) fn add<M: AutodiffModule<B>>(&mut self, module: &M, grads: &GradientsParams) -> Option<String> {
        let mut walk = Walk::<B> { grads, path: Path::default(), place: 0, found: HashMap::new() };
        module.visit(&mut walk);
        let twice = walk.found.iter().filter(|(id, _)| self.0.contains_key(id)).map(|(_, (_, _, path))| path.clone());
        let twice = twice.min();
        self.0.extend(walk.found.into_iter().map(|(id, (place, sum, _))| (id, (place, sum))));
        twice
    }

    /// Norm of all gradients together, `[1]` in f32, added in the order of the module.
    ///
    /// # Errors
    /// [`ShardError`].
    pub(crate) fn norm(
        self,
        ranks: Option<&Ranks>,
        device: &B::Device,
    ) -> Result<Tensor<B::InnerBackend, 1>, ShardError> {
        let mut ordered: Vec<_> = self.0.into_iter().collect();
        ordered.sort_unstable_by_key(|(_, (place, _))| *place);
        let is_divided = |id: &ParamId| ranks.is_some_and(|ranks| ranks.is_divided(*id));
        let (divided, sums): (Vec<_>, Vec<_>) = ordered.into_iter().partition(|(id, _)| is_divided(id));
        let mut sums: Vec<_> = sums.into_iter().map(|(_, (_, sum))| sum).collect();
        if let (Some(ranks), [_, ..]) = (ranks, &divided[..]) {
            // Divided parameters are summed over the ranks of a copy, each element once. Replicated ones
            // count once.
            let own = divided.into_iter().filter(|(id, _)| ranks.is_first_with(*id)).map(|(_, (_, sum))| sum);
            let own: Vec<_> = own.collect();
            let own = match own.is_empty() {
                true => vec![0.0],
                false => sum(Tensor::cat(own, 0)).into_data().iter::<f32>().collect(),
            };
            let all = ranks.sum_of_copy("squares of the gradients", own)?;
            sums.push(Tensor::from_data(TensorData::new(all, [1]), (device, DType::F32)));
        }
        Ok(match sums {
            sums if sums.is_empty() => Tensor::zeros([1], (device, DType::F32)),
            sums => sum(Tensor::cat(sums, 0)).sqrt(),
        })
    }
}

struct Walk<'a, B: AutodiffBackend> {
    grads: &'a GradientsParams,
    path: Path,
    /// Parameters seen so far.
    place: usize,
    /// Place, sum of squares and path of each parameter. A parameter may occur several times.
    found: HashMap<ParamId, (usize, Tensor<B::InnerBackend, 1>, String)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Walk<'_, B> {
    tracks_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.place += 1;
        if let (Some(grad), Entry::Vacant(new)) =
            (self.grads.get::<B::InnerBackend, D>(param.id), self.found.entry(param.id))
        {
            new.insert((self.place, sum_of_squares(grad), self.path.parameter_name()));
        }
    }
}

struct ScaleGradients<'a, B: AutodiffBackend> {
    grads: &'a mut GradientsParams,
    factor: Tensor<B::InnerBackend, 1>,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for ScaleGradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) {
            let factor = self.factor.clone().cast(grad.dtype()).reshape([1; D]);
            self.grads.register(param.id, grad * factor);
        }
    }
}
