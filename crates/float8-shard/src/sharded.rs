//! [`Sharded`]: a model with sharded linears and embeddings; other parameters are replicated.
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::comm::{Communicator, Operation};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::report::Layer;
use burn_float8::shard_hooks::{self, Change, SourcedWeight, sourced_weights};
use burn_float8::{ApplyError, Float8Stack, Float8Tensor};

use crate::all_reduce::all_reduce;
use crate::backend::ShardBackend;
use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::gather_cache::{GatherCache, amaxes_to_reduce, keep_amax};
use crate::gradients;
use crate::place::{Parts, Place, parameters};
use crate::prefetch::Prefetch;
use crate::shard_params::{Divided, ShardSummary, divide};
use crate::shardable::check;
use crate::sharding::Sharding;
use crate::world::World;

/// Handle to the ranks of a sharded model.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::LinearConfig;
/// use burn_float8::{Float8, Float8Config};
/// use float8_shard::{Communicator, ShardConfig, Sharded};
///
/// type B = Float8<Autodiff<Flex>>;
/// let model = LinearConfig::new(64, 32).init::<B>(&Default::default());
/// let model = Float8Config::tensorwise().apply(model).unwrap().0;
/// // A world of one; under a launcher use its communicator.
/// let (model, sharded) = Sharded::apply(model, &Communicator::solo(), ShardConfig::default()).unwrap();
/// sharded.precompute_scales(&model); // before each step
/// assert_eq!(sharded.summary().sharded, 1);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Sharded {
    comm: Communicator,
    shard: Communicator,
    copy: Communicator,
    data: Communicator,
    replica: usize,
    /// `World` of the inner backend.
    world: Arc<dyn Any + Send + Sync>,
    requires_gradient_sync: Arc<AtomicBool>,
    summary: ShardSummary,
}

impl Sharded {
    /// Keeps this rank's rows of each linear's weight and of each embedding; other parameters stay
    /// whole. With [`ShardConfig::experts`] it keeps this rank's experts of each mixture.
    /// [`ShardConfig::replicate`] copies of the model are divided this way, each by
    /// [`ShardConfig::shard`] ranks.
    ///
    /// All ranks call it with the same model and equal parameter values. For FP8 call it after
    /// [`Float8Config::apply`](burn_float8::Float8Config::apply), because the shards depend on the
    /// casts.
    ///
    /// The parameters of the returned model are the shards, `[chunk, N]`. Element-wise optimizers
    /// (AdamW, SGD, Adam) keep moments of the shard only. Optimizers with matrix products (Muon)
    /// panic; L-BFGS would compute a wrong result.
    ///
    /// Gradients of shards are summed over all ranks in backward. After
    /// [`precompute_scales`](Self::precompute_scales), and other gradients always, they are summed by
    /// [`reduce_gradients`](Self::reduce_gradients). Parameters loaded later may be whole or shards:
    /// a model of expanded zeros, which takes no memory, is sharded first and loaded then.
    ///
    /// Earlier clones of the model stay whole. With delayed scaling they share the amax histories,
    /// which ranks reduce from now on, so train only one of the two.
    ///
    /// Divide a loss by the count over all ranks, not by one rank's: gradients are summed, not
    /// averaged. `nn::Linear` and `nn::Embedding` read the whole weight. Other operations, such as
    /// `Tensor::matmul`, a transpose of the weight or a gradient norm, see only this rank's rows.
    /// The configuration cannot be changed later.
    ///
    /// # Errors
    ///
    /// [`ShardError`] with the model: it is quantized, already sharded, of an unsupported dtype, or
    /// has nothing to shard. Also if the ranks' models differ, or NCCL connects another device.
    pub fn apply<B: Float8Stack<Inner: ShardBackend>, M: Module<B>>(
        model: M,
        comm: &Communicator,
        config: ShardConfig,
    ) -> Result<(M, Self), ApplyError<M, ShardError>> {
        let world = World::<B::Inner>::new(comm, config);
        let checked = world.and_then(|world| Ok((check::<B, M>(&model, &world, config)?, Arc::new(world))));
        let (found, world) = match checked {
            Ok(checked) => checked,
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let like = found.first().and_then(|linear| linear.layer().cloned());
        let Divided { model, summary, layers } = divide::<B, M>(model, &world, config, like);
        // Of no weight: for what all ranks decide together.
        let hooks = Arc::new(Sharding::new(world.clone(), "the model", [0, 0], 1, config));
        let before = || found.iter().filter_map(|linear| Some((linear.layer()?, &linear.device)));
        for (layer, device) in before() {
            // New layers of divided linears; other experts keep theirs.
            let now = |layer: &Arc<Layer>| {
                let is_new =
                    |new: &&Arc<Layer>| new.name() == layer.name() && shard_hooks::are_applied_together(new, layer);
                layers.iter().find(is_new).unwrap_or(layer).clone()
            };
            let of_conversion: Vec<_> = before()
                .filter(|(other, _)| shard_hooks::are_applied_together(other, layer))
                .map(|(layer, _)| now(layer))
                .collect();
            shard_hooks::set_peers::<B::Inner>(layer, device, &of_conversion, hooks.clone());
        }
        log::info!("{summary}");
        let requires_gradient_sync = world.requires_gradient_sync.clone();
        let [shard, copy, data] = [&world.shard, &world.copy, &world.data].map(|group| group.comm.clone());
        let (comm, replica) = (comm.clone(), world.replicate.comm.rank());
        Ok((model, Self { comm, shard, copy, data, replica, world, requires_gradient_sync, summary }))
    }

    fn world<B: Float8Backend>(&self) -> &World<B> {
        self.world.downcast_ref().expect("the model is on the backend on which it was sharded")
    }

    /// Communicator of all ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Communicator of the ranks that divide this rank's copy of the model, or its parts of the linears
    /// with [`ShardConfig::tensor`].
    pub fn shard_communicator(&self) -> &Communicator {
        &self.shard
    }

    /// Communicator of the ranks that hold this rank's copy of the model, in all shards and parts. A sum
    /// over a model, such as the norm of gradients, is over these.
    pub fn copy_communicator(&self) -> &Communicator {
        &self.copy
    }

    /// Communicator of the ranks with the same parts of linears, each with batches of its own. A sum over
    /// batches, such as the loss, is over these.
    pub fn data_communicator(&self) -> &Communicator {
        &self.data
    }

    /// Index of this rank's copy of the model, from 0.
    pub fn replica(&self) -> usize {
        self.replica
    }

    /// Numbers of parameters and elements.
    pub fn summary(&self) -> ShardSummary {
        self.summary
    }

    /// Computes the amaxes for the next casts of all sharded weights with one all-reduce, and
    /// begins a step (torchao's `precompute_float8_dynamic_scale_for_fsdp`).
    ///
    /// Call it on all ranks before each step. From the second step on, each weight is gathered
    /// while the previous layer computes. Without the call each weight has a separate all-reduce
    /// and gather when it is first read. Waits for the device, unless NCCL connects it.
    ///
    /// From then on the reduce-scatter of a gradient runs while backward computes others: gradients
    /// of shards are zeros until [`reduce_gradients`](Self::reduce_gradients) or
    /// [`wait_for_gradients`](Self::wait_for_gradients).
    pub fn precompute_scales<B: Float8Stack, M: Module<B>>(&self, model: &M) {
        let (weights, world) = (sourced_weights::<B, M>(model), self.world::<B::Inner>());
        let amaxes = |weight| amaxes_to_reduce(weight).into_iter().map(move |(of, amax)| ((weight, of), amax));
        let (places, own): (Vec<_>, Vec<_>) = weights.iter().flat_map(amaxes).unzip();
        if let Some(first) = own.first() {
            let (label, collectives) =
                ("amaxes of all weights", world.copy.on_device(&<B::Inner>::float_device(first)));
            let all = all_reduce(&self.copy, collectives.as_deref(), label, Operation::AllReduceMaxBits, own);
            for ((weight, of), amax) in places.into_iter().zip(all.unwrap_or_else(|error| panic!("{error}"))) {
                keep_amax(weight, of, amax);
            }
        }
        world.reduces.begin();
        let mut steps: Vec<(Arc<Prefetch<_>>, Vec<_>)> = vec![];
        // Experts are not gathered.
        let is_gathered = |weight: &SourcedWeight<_>| shard_hooks::source::<B::Inner>(weight.layer()).is_some();
        for weight in weights.into_iter().filter(is_gathered) {
            let ahead = weight.shared();
            match steps.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &ahead)) {
                Some((_, of_conversion)) => of_conversion.push(weight),
                None => steps.push((ahead, vec![weight])),
            }
        }
        for (ahead, of_conversion) in steps {
            forget_started(&ahead);
            ahead.begin(of_conversion);
        }
    }

    /// Sets whether backward exchanges the gradients of shards (FSDP2's
    /// `set_requires_gradient_sync`). The default is true. All ranks call it at the same point.
    ///
    /// While it is false, each rank accumulates its gradients of the whole weight in f32, and the
    /// gradient of the shard is zeros. The first backward after it is true again exchanges their
    /// sum. So several backward passes cost one exchange, and meanwhile four bytes per weight
    /// element on every rank.
    ///
    /// Replicated parameters, and all parameters with one shard per copy, have the gradient of each pass
    /// as usual. Accumulate the gradients of all passes (`GradientsAccumulator`); the zeros of
    /// shards do not change the sum.
    pub fn set_requires_gradient_sync(&self, requires_gradient_sync: bool) {
        self.requires_gradient_sync.store(requires_gradient_sync, Ordering::Relaxed);
    }

    /// Waits in a step for the reduce-scatters of these gradients, which backward has made, and sets
    /// them. With several passes, call it after each, so that their sums have one order.
    ///
    /// # Errors
    ///
    /// [`ShardError`].
    pub fn wait_for_gradients<B: Float8Stack + AutodiffBackend, M: Module<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), ShardError> {
        gradients::wait::<B, M>(self.world(), model, grads)
    }

    /// Waits as [`wait_for_gradients`](Self::wait_for_gradients) does, and sums the gradients of
    /// replicated parameters over the ranks with other batches, in f32. With one shard per copy these are
    /// all parameters. A parameter without a gradient on any rank still has none. With tensor
    /// parallelism call [`TensorParallel::reduce_gradients`](crate::TensorParallel::reduce_gradients)
    /// after it.
    ///
    /// Call it at the end of a step: it drops gathers that were started and not read. Waits for the
    /// device, unless NCCL connects it.
    ///
    /// # Errors
    ///
    /// [`ShardError`].
    pub fn reduce_gradients<B: Float8Stack + AutodiffBackend, M: Module<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), ShardError> {
        sourced_weights::<B, M>(model).iter().for_each(|weight| forget_started::<B::Inner>(&weight.shared()));
        let is_whole =
            |_, value: &FloatTensor<B>| Sharding::of_value::<B>(value).is_none_or(|sharding| !sharding.is_divided());
        gradients::reduce::<B, M>(self.world(), model, grads, is_whole)?;
        let is_expert = |_, value: &FloatTensor<B>| {
            Sharding::of_value::<B>(value).is_some_and(|sharding| sharding.is_divided() && sharding.has_experts())
        };
        gradients::sum::<B, M>(&self.world().replicate, model, grads, is_expert)
    }

    /// Places of this rank's elements in the model's parameters, in its order. A shard is padded with zeros
    /// below its rows to the same number on each rank.
    pub fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<Place> {
        parameters::<B, M>(model)
    }

    /// Whether this is a shard of a parameter that ranks divide.
    pub fn is_shard<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> bool {
        let TensorPrimitive::Float(value) = parameter.clone().into_primitive() else { return false };
        Sharding::of_value::<B>(&value).is_some_and(|sharding| sharding.is_divided())
    }

    /// Gathers whole parameters from the shards and the tensor-parallel parts of all ranks, which call it
    /// together. The result has no FP8 configuration.
    pub fn gather<B: Float8Stack, M: Module<B>>(model: M) -> M {
        let mut parts = Parts::<B::Inner>::default();
        shard_hooks::map_params::<B, M>(model, |param| {
            let (value, part) = (param.float(), parts.next(param));
            let sharding = value.as_ref().and_then(Sharding::of_value::<B>);
            let Some(value) = value.filter(|_| sharding.is_some() || part.is_some()) else { return Change::None };
            let whole = |own: Float8Tensor<_>| {
                let mut all = own.into_full();
                if let Some(sharding) = sharding {
                    all = sharding.in_shape(sharding.gather_values(sharding.matrix(all)));
                }
                if let Some(part) = part {
                    all = part.gather(all);
                }
                Float8Tensor::new(all)
            };
            Change::Replaced(B::map_float8(value, whole))
        })
    }
}

/// Ends the current step and drops its unread gathers.
fn forget_started<B: Float8Backend>(ahead: &Prefetch<B>) {
    ahead.end().iter().for_each(|weight| weight.cache().get::<GatherCache<B>>().forget_started());
}
