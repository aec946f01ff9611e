//! [`Sharded`]: a model of which each rank keeps a part: linears and embeddings sharded, everything else replicated.
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};
use float8_comm::{CommError, Communicator};

use super::all_reduce::{Reduction, all_reduce};
use super::gradients;
use super::shardable::{ShardedParameter, check, parameters};
use super::sharder::{ShardSummary, Sharder};
use super::walk::{FoundLinear, linears, sharding_of};
use crate::backend::Float8Backend;
use crate::config::{Policy, ScalingType};
use crate::error::ApplyError;
use crate::layer::{Layer, Tag};
use crate::sharding::{Amax, ShardConfig, ShardError};
use crate::stack::Float8Stack;
use crate::step::{DeviceState, Ranks, TrackedCast};
use crate::tensor::{Ahead, AmaxOf, Float8Tensor, ShardedWeight, amaxes_to_reduce};
use crate::terms::Operand;

/// The ranks of a sharded model, and what each of them keeps.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::LinearConfig;
/// use burn_float8::{shard::{Communicator, ShardConfig, Sharded}, Float8, Float8Config};
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
    summary: ShardSummary,
}

impl Sharded {
    /// Keeps of each linear's weight and each embedding of `model` the rows of this rank; every other parameter stays whole. All
    /// ranks call it with the same model, whose parameters have the same values, after
    /// [`Float8Config::apply`](crate::Float8Config::apply), if it is to run in FP8 at all: the shards follow from how weights are cast.
    ///
    /// The parameters of the model that is returned are the shards, `[chunk, N]`, so that optimizers which look at one element at a
    /// time (AdamW, SGD, Adam) keep only the moments of the shard. Ones that multiply matrices (Muon) end with
    /// [`Float8Error::ShardedMatmul`](crate::Float8Error::ShardedMatmul); L-BFGS would compute something else. Gradients of sharded
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
    pub fn apply<B: Float8Stack, M: Module<B>>(
        model: M,
        comm: &Communicator,
        config: ShardConfig,
    ) -> Result<(M, Self), ApplyError<M, ShardError>> {
        let found = match check::<B, M>(&model, comm, config) {
            Ok(found) => found,
            Err(error) => return Err(ApplyError { error, model: Box::new(model) }),
        };
        let conversion = found.first().and_then(|linear| Some(linear.tag.as_ref()?.layer.conversion().clone()));
        let mut sharder = Sharder::new(comm, config, conversion);
        let model = Module::<B>::map(model, &mut sharder);
        let (summary, layers) = sharder.finish();
        for linear in &found {
            let Some(Tag { layer, .. }) = &linear.tag else { continue };
            let device = linear.device.clone();
            // Sharded ones in their new form; experts stay as they were.
            let now = |tag: &Tag| {
                let new = layers.iter().find(|new| {
                    new.name() == tag.layer.name() && Arc::ptr_eq(new.conversion(), tag.layer.conversion())
                });
                new.unwrap_or(&tag.layer).clone()
            };
            let tags = found.iter().filter_map(|linear| linear.tag.as_ref());
            let of_conversion: Vec<_> =
                tags.filter(|tag| Arc::ptr_eq(tag.layer.conversion(), layer.conversion())).map(now).collect();
            let config = layer.conversion().config();
            let ranks = Ranks {
                comm: comm.clone(),
                device: device.clone(),
                casts: of_conversion.iter().flat_map(|layer| tracked_casts(layer)).collect(),
                layers: of_conversion.iter().map(Arc::downgrade).collect(),
                may_fall_back: config.fallback.is_some() && config.statistics.is_some(),
            };
            DeviceState::<B::Inner>::of(layer, &device).set_ranks(ranks);
        }
        log::info!("{summary}");
        Ok((model, Self { comm: comm.clone(), summary }))
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
        let weights = float8_weights::<B, M>(model);
        let mut wanted = vec![];
        for ShardedWeight { weight, layer, plan } in &weights {
            wanted.extend(amaxes_to_reduce(weight, layer, plan).into_iter().map(|wanted| (weight.clone(), wanted)));
        }
        if !wanted.is_empty() {
            self.reduce_amaxes(wanted);
        }
        let mut steps: Vec<(Arc<Ahead<_>>, Vec<_>)> = vec![];
        for weight in weights {
            let ahead = weight.ahead();
            match steps.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &ahead)) {
                Some((_, of_conversion)) => of_conversion.push(weight),
                None => steps.push((ahead, vec![weight])),
            }
        }
        steps.into_iter().for_each(|(ahead, of_conversion)| ahead.begin(of_conversion));
    }

    fn reduce_amaxes<B: Float8Backend>(&self, wanted: Vec<Wanted<B>>) {
        let (places, own): (Vec<_>, Vec<_>) =
            wanted.into_iter().map(|(weight, (of, amax))| ((weight, of), amax.0)).unzip();
        let collectives = B::fp8_collectives(&B::float_device(&own[0]), &self.comm);
        let all = all_reduce(&self.comm, collectives.as_deref(), "amaxes of all weights", Reduction::Max, own);
        let all = all.unwrap_or_else(|error| panic!("{error}"));
        for ((weight, of), amax) in places.into_iter().zip(all) {
            weight.cache().set_reduced(of, Amax(amax));
        }
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
        float8_weights::<B, M>(model).iter().for_each(|weight| weight.ahead().end());
        gradients::reduce::<B, M>(&self.comm, model, grads)
    }

    /// Whether each parameter of the model is sharded, by its path in the module tree, and the shape of the whole.
    pub fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedParameter> {
        parameters::<B, M>(model)
    }

    /// Whether this is a shard of a parameter.
    pub fn is_shard<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> bool {
        sharding_of(parameter).is_some()
    }

    /// The rows of the whole parameter that this rank has: all, if it is not sharded. Below them a shard has zeros, up to the rows that
    /// each rank has.
    pub fn rows<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> Range<usize> {
        sharding_of(parameter).map_or_else(|| 0..parameter.dims()[0], |sharding| sharding.rows())
    }

    /// The shape of the whole parameter.
    pub fn whole_shape<B: Float8Stack, const D: usize>(parameter: &Tensor<B, D>) -> Vec<usize> {
        sharding_of(parameter).map_or_else(|| parameter.dims().to_vec(), |sharding| sharding.logical().to_vec())
    }

    /// The model with whole parameters, from the shards of all ranks, which all call it; no FP8 configuration is applied to it.
    pub fn gather<B: Float8Stack, M: Module<B>>(model: M) -> M {
        struct Gather;
        impl<B: Float8Stack> ModuleMapper<B> for Gather {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
                let (id, tensor, _) = param.consume();
                let whole = match tensor.into_primitive() {
                    TensorPrimitive::Float(t) => TensorPrimitive::Float(B::map_float8(t, |t| {
                        let sharding = t.layer().and_then(|layer| layer.sharding()).cloned();
                        match sharding {
                            Some(sharding) => Float8Tensor::new(sharding.gather_values::<B::Inner>(t.into_full())),
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

/// A weight, and an amax of this rank's rows that its casts need from all ranks.
type Wanted<B> = (Float8Tensor<B>, (AmaxOf, Amax<B>));

/// The casts of a layer that are scaled by a history.
fn tracked_casts(layer: &Layer) -> Vec<TrackedCast> {
    let policy = layer.configured();
    let Policy::Float8(config) = policy.as_ref() else { return vec![] };
    let new = |operand: Operand| {
        let cast = config.casts().of(operand);
        (cast.scaling_type == ScalingType::Delayed).then(|| TrackedCast {
            layer: layer.name().into(),
            role: operand.role,
            scaling: config.delayed_scaling(),
            initial: cast.target_dtype.max(),
        })
    };
    let mut casts: Vec<TrackedCast> = Operand::ALL.into_iter().filter_map(new).collect();
    casts.dedup_by_key(|cast| cast.role);
    casts
}

/// The sharded weights that are to be read in FP8.
fn float8_weights<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedWeight<B::Inner>> {
    let float8 = |FoundLinear { tag, weight, .. }: FoundLinear<B>| {
        let (Tag { layer, enabled, .. }, weight) = (tag?, B::float8_tensor(&weight?));
        let is_read = enabled && layer.sharding().is_some();
        let plan = layer.plan(None).ok().filter(|_| is_read)?;
        Some(ShardedWeight { weight, layer, plan })
    };
    linears::<B, M>(model, None).into_iter().filter_map(float8).collect()
}
