//! [`Sharded`]: a model of which each rank keeps a part: linears and embeddings sharded, everything else replicated.
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::report::Layer;
use burn_float8::seam::{self, sourced_weights};
use burn_float8::source::SourcedWeight;
use burn_float8::{ApplyError, Float8Stack, Float8Tensor};
use float8_comm::{CommError, Communicator};

use crate::ahead::Ahead;
use crate::all_reduce::{Reduction, all_reduce};
use crate::backend::ShardBackend;
use crate::config::ShardConfig;
use crate::error::ShardError;
use crate::gradients;
use crate::kept::{AmaxOf, Kept, amaxes_to_reduce};
use crate::peers::Peers;
use crate::shardable::{ShardedParameter, check, parameters};
use crate::sharder::{ShardSummary, Sharder};
use crate::sharding::Sharding;
use crate::world::World;

/// The ranks of a sharded model, and what each of them keeps.
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
/// // A world of one; with a launcher, the communicator of a program that it started.
/// let (model, sharded) = Sharded::apply(model, &Communicator::solo(), ShardConfig::default()).unwrap();
/// sharded.precompute_scales(&model); // before each step
/// assert_eq!(sharded.summary().sharded, 1);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Sharded {
    comm: Communicator,
    /// The `World` of the backend that computes.
    world: Arc<dyn Any + Send + Sync>,
    requires_gradient_sync: Arc<AtomicBool>,
    summary: ShardSummary,
}

impl Sharded {
    /// Keeps of each linear's weight and each embedding of `model` the rows of this rank; every other parameter stays whole. All
    /// ranks call it with the same model, whose parameters have the same values, after
    /// [`Float8Config::apply`](burn_float8::Float8Config::apply), if it is to run in FP8 at all: the shards follow from how weights are cast.
    ///
    /// The parameters of the model that is returned are the shards, `[chunk, N]`, so that optimizers which look at one element at a
    /// time (AdamW, SGD, Adam) keep only the moments of the shard. Ones that multiply matrices (Muon) end with
    /// a panic; L-BFGS would compute something else. Gradients of sharded
    /// parameters are sums over all ranks when backward ends; [`reduce_gradients`](Self::reduce_gradients) adds up the others. What
    /// is loaded later may be whole or a shard. Clones made before stay whole; with delayed scaling they share the amax histories, which
    /// ranks reduce from then on, so that only one of the two is to be trained.
    ///
    /// A loss is to be divided by what counts on all ranks, not by what counts on one: gradients are added, not averaged.
    /// `nn::Linear` and `nn::Embedding` read the whole weight; everything else, such as `Tensor::matmul`, a transpose of the weight or a
    /// gradient norm, sees this rank's rows. A configuration cannot be changed afterwards.
    ///
    /// # Errors
    ///
    /// [`ShardError`] with the model: quantized, sharded already, of a dtype that is not exchanged, nothing to
    /// shard; ranks whose models differ; NCCL without MPI, or between other devices than the model's.
    pub fn apply<B: Float8Stack<Inner: ShardBackend>, M: Module<B>>(
        model: M,
        comm: &Communicator,
        config: ShardConfig,
    ) -> Result<(M, Self), ApplyError<M, ShardError>> {
        let world = Arc::new(World::<B::Inner>::new(comm));
        let found = match check::<B, M>(&model, &world, config) {
            Ok(found) => found,
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let like = found.first().and_then(|linear| linear.layer().cloned());
        let mut sharder = Sharder::<B>::new(world.clone(), config, like);
        let model = Module::<B>::map(model, &mut sharder);
        let (summary, layers) = sharder.finish();
        let before = || found.iter().filter_map(|linear| Some((linear.layer()?, &linear.device)));
        for (layer, device) in before() {
            // Sharded ones in their new form; experts stay as they were.
            let now = |layer: &Arc<Layer>| {
                let is_new = |new: &&Arc<Layer>| new.name() == layer.name() && seam::is_one_conversion(new, layer);
                layers.iter().find(is_new).unwrap_or(layer).clone()
            };
            let of_conversion: Vec<_> = before()
                .filter(|(other, _)| seam::is_one_conversion(other, layer))
                .map(|(layer, _)| now(layer))
                .collect();
            let config = seam::config(layer);
            let peers = Peers {
                world: world.clone(),
                layers: of_conversion.iter().map(Arc::downgrade).collect(),
                may_fall_back: config.fallback.is_some() && config.statistics.is_some(),
            };
            seam::set_peers::<B::Inner>(layer, device, &of_conversion, Arc::new(peers));
        }
        log::info!("{summary}");
        let requires_gradient_sync = world.requires_gradient_sync.clone();
        Ok((model, Self { comm: comm.clone(), world, requires_gradient_sync, summary }))
    }

    fn world<B: Float8Backend>(&self) -> &World<B> {
        self.world.downcast_ref().expect("the model is on the backend on which it was sharded")
    }

    /// The ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// What each rank keeps.
    pub fn summary(&self) -> ShardSummary {
        self.summary
    }

    /// Finds the amaxes that the next casts of all sharded weights need, by one all-reduce (torchao's
    /// `precompute_float8_dynamic_scale_for_fsdp`), and begins a step: from the second on, weights are gathered while the layer before
    /// computes. To be called on all ranks before each step. Without it each weight has an all-reduce of its own when it is first
    /// read, and is gathered then. Waits for the device, unless NCCL connects it.
    pub fn precompute_scales<B: Float8Stack, M: Module<B>>(&self, model: &M) {
        let weights = sourced_weights::<B, M>(model);
        let mut wanted = vec![];
        for weight in &weights {
            wanted.extend(amaxes_to_reduce(weight).into_iter().map(|(of, amax)| ((weight, of), amax)));
        }
        if !wanted.is_empty() {
            self.reduce_amaxes(wanted);
        }
        let mut steps: Vec<(Arc<Ahead<_>>, Vec<_>)> = vec![];
        for weight in weights {
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

    fn reduce_amaxes<B: Float8Backend>(&self, wanted: Vec<Wanted<'_, B>>) {
        let (places, own): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let collectives = self.world::<B>().on_device(&B::float_device(&own[0]));
        let all = all_reduce(&self.comm, collectives.as_deref(), "amaxes of all weights", Reduction::Max, own);
        let all = all.unwrap_or_else(|error| panic!("{error}"));
        for ((weight, of), amax) in places.into_iter().zip(all) {
            weight.cache().get::<Kept<B>>().amaxes.push((of, amax));
        }
    }

    /// Whether backward exchanges the gradients of shards (FSDP2's `set_requires_gradient_sync`); true unless this was called.
    ///
    /// While it is false, each rank adds up its own gradients of the whole weight, in f32, and the gradient of the shard is zeros. The next
    /// backward after it is true again exchanges the sum of all of them. So a weight that several backward passes read costs one exchange,
    /// and meanwhile four bytes for each of its elements on every rank. All ranks call it at the same place.
    ///
    /// Parameters that every rank keeps whole, and all parameters in a world of one, have the gradient of each pass, as usual: accumulate
    /// the gradients of all passes (`GradientsAccumulator`). The zeros of shards change nothing in the sum.
    pub fn set_requires_gradient_sync(&self, requires_gradient_sync: bool) {
        self.requires_gradient_sync.store(requires_gradient_sync, Ordering::Relaxed);
    }

    /// Adds up the gradients of the parameters that every rank keeps whole, in f32, by one all-reduce; those of sharded ones are
    /// added up already. A parameter without a gradient on any rank has none afterwards. It ends the step: gathers that were started
    /// and that nobody has read are let go. Waits for the device, unless NCCL connects it.
    ///
    /// # Errors
    ///
    /// [`CommError`].
    pub fn reduce_gradients<B: Float8Stack + AutodiffBackend, M: Module<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), CommError> {
        sourced_weights::<B, M>(model).iter().for_each(|weight| forget_started::<B::Inner>(&weight.shared()));
        gradients::reduce::<B, M>(self.world(), model, grads)
    }

    /// Whether each parameter of the model is sharded, by its path in the module tree, and the shape of the whole.
    pub fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedParameter> {
        parameters::<B, M>(model)
    }

    /// Whether this is a shard of a parameter.
    pub fn is_shard<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> bool {
        Sharding::of_parameter(parameter).is_some()
    }

    /// The rows of the whole parameter that this rank has: all, if it is not sharded. Below them a shard has zeros, up to the rows that
    /// each rank has.
    pub fn rows<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> Range<usize> {
        Sharding::of_parameter(parameter).map_or_else(|| 0..parameter.dims()[0], |sharding| sharding.rows())
    }

    /// The shape of the whole parameter.
    pub fn whole_shape<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> Vec<usize> {
        Sharding::of_parameter(parameter)
            .map_or_else(|| parameter.dims().to_vec(), |sharding| sharding.logical.to_vec())
    }

    /// The model with whole parameters, from the shards of all ranks, which all call it; no FP8 configuration is applied to it.
    pub fn gather<B: Float8Stack, M: Module<B>>(model: M) -> M {
        struct Gather;
        impl<B: Float8Stack> ModuleMapper<B> for Gather {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
                let (id, tensor, _) = param.consume();
                let whole = match tensor.into_primitive() {
                    TensorPrimitive::Float(t) => TensorPrimitive::Float(B::map_float8(t, |t| {
                        match t.layer().and_then(|layer| Sharding::<B::Inner>::of(layer)) {
                            Some(sharding) => Float8Tensor::new(sharding.gather_values(t.into_full())),
                            None => t,
                        }
                    })),
                    quantized => quantized,
                };
                Param::initialized(id, Tensor::from_primitive(whole))
            }
        }
        Module::<B>::map(model, &mut Gather)
    }
}

/// An amax of this rank's rows that the casts of a weight need from all ranks.
type Wanted<'a, B> = ((&'a SourcedWeight<B>, AmaxOf), FloatTensor<B>);

/// Ends the step under way: what is on its way and was not read is let go.
fn forget_started<B: Float8Backend>(ahead: &Ahead<B>) {
    ahead.end().iter().for_each(|weight| weight.cache().get::<Kept<B>>().forget_started());
}
