//! [`TensorParallel`]: linears that ranks divide among them, each with some columns or rows of the
//! weight.
//!
//! ```text
//! colwise   x  [M/R, K] cast → all-gather codes and scales → x [M, K] · w [K, N/R] = y [M, N/R]
//!           dy [M, N/R] · wᵀ [N/R, K] = terms of dx [M, K] → reduce-scatter → dx [M/R, K]
//! rowwise   x  [M, K/R] · w [K/R, N] = terms of y [M, N] → reduce-scatter → y [M/R, N]
//!           dy [M/R, N] cast → all-gather codes and scales → dy [M, N] · wᵀ [N, K/R] = dx [M, K/R]
//! ```
//!
//! M counts the tokens of all sequences. Rank r has the rows r · M/R to (r + 1) · M/R.
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_backend::TensorMetadata;
use burn_float8::config::{LinearInfo, Policy};
use burn_float8::shard_hooks::{self, Change, FoundLinear, ParallelStyle, linears, map_params, visit_params};
use burn_float8::{ApplyError, Float8Error, Float8Stack, Float8Tensor};

use crate::backend::ShardBackend;
use crate::comm::Communicator;
use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::gradients;
use crate::parallel_part::Part;
use crate::place::module_of;
use crate::shardable::check;
use crate::sharding::{Sharding, alignment, alignment_of};
use crate::world::World;

/// Division of a module over ranks, in torchtitan's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorStyle {
    /// A linear whose columns are divided. It reads tokens that are divided, and returns all tokens.
    Colwise,
    /// A linear whose rows are divided, or an embedding whose vocabulary is. It reads all tokens, and
    /// returns tokens that are divided.
    Rowwise,
    /// A module with whole parameters that reads tokens that are divided, such as a norm, or adapters of a
    /// linear that is divided.
    Sequence,
}

/// Styles by the names of modules, which match as in `filter_fqns`. If several patterns match a module,
/// the last counts.
pub type ParallelPlan = Vec<(String, TensorStyle)>;

/// Handle to the ranks of a model with divided linears.
///
/// Any model can have a plan. Its code does not change, except for:
///
/// - Sizes that it counts by rank, such as heads of attention.
/// - The loss of an output layer in [`Colwise`](TensorStyle::Colwise), whose logits are this rank's part of
///   the vocabulary: [`burn_float8::nn::parallel_log_likelihood`]. A tied table needs
///   [`burn_float8::nn::parallel_tokens`] before the product.
///
/// Every module with parameters that reads divided tokens, or this rank's heads, needs a style: without
/// [`Sequence`](TensorStyle::Sequence) its gradients are of this rank's tokens, and ranks drift apart.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_float8::{Float8, Float8Config};
/// use float8_shard::{Communicator, ParallelPlan, TensorParallel, TensorStyle};
///
/// #[derive(Module, Debug)]
/// struct Mlp<B: Backend> {
///     norm: LayerNorm<B>,
///     gate_proj: Linear<B>,
///     up_proj: Linear<B>,
///     down_proj: Linear<B>,
/// }
///
/// let device = Default::default();
/// let mlp = Mlp::<Float8<Autodiff<Flex>>> {
///     norm: LayerNormConfig::new(64).init(&device),
///     gate_proj: LinearConfig::new(64, 128).init(&device),
///     up_proj: LinearConfig::new(64, 128).init(&device),
///     down_proj: LinearConfig::new(128, 64).init(&device),
/// };
/// let mlp = Float8Config::tensorwise().apply(mlp).unwrap().0;
/// let plan: ParallelPlan = vec![
///     ("norm".into(), TensorStyle::Sequence),
///     ("[gu]*_proj".into(), TensorStyle::Colwise),
///     ("down_proj".into(), TensorStyle::Rowwise),
/// ];
/// let (mlp, parallel) = TensorParallel::apply(mlp, &Communicator::solo(), &plan).unwrap();
/// // After backward: parallel.reduce_gradients(&mlp, &mut grads)?
/// assert_eq!(parallel.token_alignment(), 16);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TensorParallel {
    /// `World` of the inner backend.
    world: Arc<dyn Any + Send + Sync>,
    /// Whole parameters that read divided tokens.
    summed: Vec<ParamId>,
    token_alignment: usize,
}

impl TensorParallel {
    /// Keeps this rank's columns or rows of each linear that the plan divides.
    ///
    /// All ranks of `comm` call it with the same model and equal parameter values, after
    /// [`Float8Config::apply`](burn_float8::Float8Config::apply). In a mesh they are
    /// [`ShardConfig::tensor_ranks`], and [`Sharded::apply`](crate::Sharded::apply) follows.
    ///
    /// Tokens are along the axis before the last: x of a `colwise` linear is `[.., S / ranks, K]`, and its
    /// y `[.., S, N / ranks]`. Rank r has the r-th of equal parts of the tokens of all sequences.
    ///
    /// Codes and scales are the whole tensors'. Parameters loaded later may be whole or parts.
    ///
    /// # Errors
    /// [`ShardError`] with the model: the plan matches nothing or names another kind of module, or ranks
    /// do not divide a weight into whole blocks of its recipe. Otherwise as
    /// [`Sharded::apply`](crate::Sharded::apply).
    pub fn apply<B: Float8Stack<Inner: ShardBackend>, M: Module<B>>(
        model: M,
        comm: &Communicator,
        plan: &ParallelPlan,
    ) -> Result<(M, Self), ApplyError<M, ShardError>> {
        let config = ShardConfig::default();
        let checked = World::<B::Inner>::new(comm, config).and_then(|world| {
            let found = check::<B, M>(&model, &world, config)?;
            comm.agree("the plan", &format!("{plan:?}"))?;
            let styles = styles::<B, M>(&model, plan)?;
            check_weights(&weights::<B, M>(&model), &styles, comm.world_size())?;
            Ok((Arc::new(world), found, styles))
        });
        let (world, found, styles) = match checked {
            Ok(checked) => checked,
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let like = found.first().and_then(|linear| linear.layer().cloned());
        let (mut layers, mut summed) = (vec![], vec![]);
        let model = map_params::<B, M>(model, |param| {
            let name = param.name();
            let module = module_of(&name);
            let is_weight = param.shape.num_dims() == 2;
            match styles.get(module) {
                None => Change::None,
                Some(TensorStyle::Sequence) => {
                    summed.push(param.id);
                    Change::None
                }
                Some(TensorStyle::Rowwise) if !is_weight => {
                    summed.push(param.id);
                    Change::None
                }
                Some(style) => {
                    let whole = param.shape.to_vec();
                    let (style, axis) = match style {
                        TensorStyle::Colwise => (ParallelStyle::Colwise, whole.len() - 1),
                        _ => (ParallelStyle::Rowwise, 0),
                    };
                    let part = Part { world: world.clone(), name: module.into(), style };
                    if !is_weight {
                        return Change::map(move |t| {
                            B::map_float8(t, |t| Float8Tensor::new(part.own(t.into_full(), &whole, axis)))
                        });
                    }
                    let old = param.float().and_then(|weight| B::layer(&weight));
                    let old = old.unwrap_or_else(|| shard_hooks::in_high_precision(module.into(), like.as_deref()));
                    let part = Arc::new(part);
                    let layer = shard_hooks::with_parallel::<B::Inner>(&old, part.clone());
                    layers.push((old, layer.clone(), param.device.clone()));
                    Change::map(move |t| {
                        B::map_float8(t, |t| {
                            shard_hooks::weight_of::<B::Inner>(layer.clone(), part.own_weight(&layer, t, &whole, axis))
                        })
                    })
                }
            }
        });
        // Of no weight: for what all ranks decide together.
        let peers = Arc::new(Sharding::new(world.clone(), "the model", [0, 0], 1, config));
        for (old, _, device) in &layers {
            let together = layers.iter().filter(|(other, ..)| shard_hooks::are_applied_together(old, other));
            let together: Vec<_> = together.map(|(_, new, _)| new.clone()).collect();
            shard_hooks::set_peers::<B::Inner>(old, device, &together, peers.clone());
        }
        let policies = layers.iter().map(|(old, ..)| shard_hooks::configured(old));
        let token_alignment = policies.map(|policy| token_alignment(&policy)).max().unwrap_or(1);
        Ok((model, Self { world, summed, token_alignment }))
    }

    /// Each rank's tokens must be a multiple of this, so that parts have whole blocks of their recipe.
    pub fn token_alignment(&self) -> usize {
        self.token_alignment
    }

    /// Sums gradients over these ranks, in f32: of the parameters of `sequence` modules, and of the biases
    /// of `rowwise` linears. After [`Sharded::reduce_gradients`](crate::Sharded::reduce_gradients), if the
    /// model is sharded too.
    ///
    /// # Errors
    /// [`ShardError`].
    pub fn reduce_gradients<B: Float8Stack + AutodiffBackend, M: Module<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), ShardError> {
        let world: &World<B::Inner> = self.world.downcast_ref().expect("the model is on the backend of its ranks");
        gradients::reduce::<B, M>(world, model, grads, |id, _| self.summed.contains(&id))
    }
}

/// Style of each module that the plan names.
pub(crate) fn styles<B: Backend, M: Module<B>>(
    model: &M,
    plan: &ParallelPlan,
) -> Result<BTreeMap<String, TensorStyle>, Float8Error> {
    let mut modules: Vec<String> = vec![];
    visit_params::<B, M>(model, |param| modules.push(module_of(&param.name()).into()));
    modules.dedup();
    let mut styles = BTreeMap::new();
    for (pattern, style) in plan {
        let found = shard_hooks::matching("plan", pattern, &modules)?;
        styles.extend(found.into_iter().map(|i| (modules[i].clone(), *style)));
    }
    Ok(styles)
}

/// Alignment of each rank's tokens for a linear with this policy.
pub(crate) fn token_alignment(policy: &Policy) -> usize {
    shard_hooks::token_granularities(policy).into_iter().map(alignment_of).max().unwrap_or(1)
}

/// Weight that a plan may divide.
pub(crate) struct Divisible {
    pub(crate) info: LinearInfo,
    /// Alignment of a part.
    pub(crate) align: usize,
    pub(crate) is_embedding: bool,
}

fn weights<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<Divisible> {
    let linear = |linear: FoundLinear<B>| {
        let policy = linear.layer().map(|layer| shard_hooks::configured(layer));
        Divisible { align: alignment(policy.as_deref()), info: linear.info, is_embedding: false }
    };
    // Ranks divide no weights of rank 3, which belong to experts.
    let is_matrix =
        |linear: &FoundLinear<B>| linear.weight.as_ref().is_none_or(|weight| weight.shape().num_dims() == 2);
    let mut weights: Vec<_> = linears::<B, M>(model, None).into_iter().filter(is_matrix).map(linear).collect();
    visit_params::<B, M>(model, |param| {
        if let Some(name) = param.path.embedding(param.shape.num_dims()) {
            let info = LinearInfo { name, k: param.shape[0], n: param.shape[1] };
            weights.push(Divisible { info, align: alignment(None), is_embedding: true });
        }
    });
    weights
}

/// Checks that the plan divides weights of linears and tables of embeddings, into whole blocks.
pub(crate) fn check_weights(
    weights: &[Divisible],
    styles: &BTreeMap<String, TensorStyle>,
    ranks: usize,
) -> Result<(), ShardError> {
    let mut unknown: Vec<_> = styles.iter().filter(|(_, style)| **style != TensorStyle::Sequence).collect();
    for Divisible { info: LinearInfo { name, k, n }, align, is_embedding } in weights {
        unknown.retain(|(known, _)| *known != name);
        let (of, len) = match styles.get(name) {
            Some(TensorStyle::Colwise) if *is_embedding => {
                return Err(ShardError::model(
                    name,
                    " is an embedding, whose vocabulary ranks divide: it must be rowwise",
                ));
            }
            Some(TensorStyle::Colwise) => ("columns", n),
            Some(TensorStyle::Rowwise) => ("rows", k),
            _ => continue,
        };
        if !len.is_multiple_of(ranks * align) {
            let reason = format!(" has {len} {of}, which {ranks} ranks do not divide into multiples of {align}");
            return Err(ShardError::model(name, reason));
        }
    }
    match unknown.first() {
        Some((name, _)) => {
            Err(ShardError::model(name.as_str(), " is no linear and no embedding, so ranks cannot divide it"))
        }
        None => Ok(()),
    }
}
