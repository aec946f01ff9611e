//! [`Sharded`]: a model of which each rank keeps a part: linears and embeddings sharded, everything else replicated.
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use float8_comm::{CommError, Communicator, Engine};
use serde::Serialize;

use super::gradients;
use super::on_device::{self, collectives, reduce_amaxes};
use super::walk::{FoundLinear, Path, linears, map_param, sharding_of};
use crate::backend::Float8Backend;
use crate::backend::host::read_f32;
use crate::config::{Casts, Policy, ScalingType};
use crate::error::ApplyError;
use crate::layer::{Conversion, Layer, Tag};
use crate::shard::{Amax, ShardConfig, ShardError, Sharding};
use crate::stack::Float8Stack;
use crate::step::{DeviceState, Ranks, TrackedCast};
use crate::tensor::{Ahead, AmaxOf, Float8Tensor, ShardedWeight, amaxes_to_reduce};
use crate::terms::{Operand, Reason};

/// Rows of a shard are a multiple of what one scale covers.
const BLOCK: usize = 128;

/// Rows of a shard where no block of scales asks for more: codes then come in whole words, and rows of the transpose in 16 bytes.
const ALIGN: usize = 16;

/// The ranks of a sharded model, and what each of them keeps.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::LinearConfig;
/// use burn_float8::{Communicator, Float8, Float8Config, ShardConfig, Sharded};
///
/// type B = Autodiff<Float8<Flex>>;
/// let model = LinearConfig::new(64, 32).init::<B>(&Default::default());
/// let model = Float8Config::tensorwise().apply(model).unwrap();
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

/// What [`Sharded::apply`] did; its `Display` is a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShardSummary {
    /// Ranks.
    pub ranks: usize,
    /// Parameters of which each rank keeps its rows.
    pub sharded: usize,
    /// Parameters that each rank keeps whole.
    pub replicated: usize,
    /// Elements of the model.
    pub elements: u64,
    /// Elements that each rank keeps, padding included.
    pub elements_per_rank: u64,
    /// Those among them that are padding, on all ranks together.
    pub padding: u64,
}

impl core::fmt::Display for ShardSummary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { ranks, sharded, replicated, elements, elements_per_rank, padding } = self;
        write!(
            f,
            "Sharded over {ranks} ranks: {sharded} parameters, {replicated} replicated; {elements_per_rank} of {elements} elements a \
             rank, {padding} of padding in all"
        )
    }
}

impl Sharded {
    /// Keeps of each linear's weight and each embedding of `model` the rows of this rank; every other parameter stays whole. All
    /// ranks call it with the same model, whose parameters have the same values, after
    /// [`Float8Config::apply`](crate::Float8Config::apply), if it is to run in FP8 at all: the shards follow from how weights are cast.
    ///
    /// The parameters of the model that is returned are the shards, `[chunk, N]`, so that optimizers which look at one element at a
    /// time (AdamW, SGD, Adam) keep only the moments of the shard; ones that look at whole matrices (Muon, L-BFGS) compute something
    /// else. Gradients of sharded parameters are sums over all ranks when backward ends;
    /// [`reduce_gradients`](Self::reduce_gradients) adds up the others. What is loaded later may be whole or a shard. Clones made
    /// before stay whole.
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
        let summary = ShardSummary { ranks: comm.world_size(), ..ShardSummary::default() };
        let new = Self { comm: comm.clone(), summary };
        let conversion = found.first().and_then(|linear| Some(linear.tag.as_ref()?.layer.conversion().clone()));
        let mut sharder = Sharder { path: Path::default(), config, conversion, new, layers: vec![] };
        let model = Module::<B>::map(model, &mut sharder);
        let Sharder { new, layers, .. } = sharder;
        for linear in &found {
            let Some(Tag { layer, .. }) = &linear.tag else { continue };
            let device = B::inner_device(&linear.device);
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
        log::info!("{}", new.summary);
        Ok((model, new))
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
        for ShardedWeight { weight, layer, config } in &weights {
            wanted.extend(amaxes_to_reduce(weight, layer, config).into_iter().map(|wanted| (weight.clone(), wanted)));
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
        let device = wanted.first().map(|(weight, _)| B::float_device(weight.full()));
        if let Some(collectives) = device.and_then(|device| B::fp8_collectives(&device, &self.comm)) {
            let own = wanted.iter().map(|(_, (_, amax))| amax.clone()).collect();
            let all = reduce_amaxes(&*collectives, own).unwrap_or_else(|error| panic!("{error}"));
            for ((weight, (of, _)), amax) in wanted.into_iter().zip(all) {
                weight.cache().set_reduced(of, amax);
            }
            return;
        }
        let values: Vec<Vec<f32>> = wanted.iter().map(|(_, (_, amax))| read_f32::<B>(amax.0.clone())).collect();
        let bits = values.iter().flatten().map(|value| value.to_bits()).collect();
        let all = self.comm.all_reduce_max_bits("amaxes of all weights", bits).and_then(|pending| pending.wait());
        let all = all.unwrap_or_else(|error| panic!("{error}"));
        let mut rest = &all[..];
        for ((weight, (of, _)), values) in wanted.into_iter().zip(values) {
            let (own, after) = rest.split_at(values.len());
            rest = after;
            let device = B::float_device(weight.full());
            weight
                .cache()
                .set_reduced(of, Amax::of_values(own.iter().map(|bits| f32::from_bits(*bits)).collect(), &device));
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
        if let Some(collectives) = collectives::<B, M>(model, &self.comm) {
            return on_device::reduce_gradients::<B, M>(&self.comm, &*collectives, model, grads);
        }
        gradients::reduce::<B, M>(&self.comm, model, grads)
    }

    /// Whether each parameter of the model is sharded, by its path in the module tree, and the shape of the whole.
    pub fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedParameter> {
        struct Walk(Path, Vec<ShardedParameter>);
        impl<B: Float8Stack> ModuleVisitor<B> for Walk {
            fn enter_module(&mut self, name: &str, container: &str) {
                self.0.enter(name, container);
            }
            fn exit_module(&mut self, _: &str, _: &str) {
                self.0.exit();
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let tensor = param.val();
                let (name, own) = (self.0.parameter_name(), tensor.dims().to_vec());
                let (shape, rows) = match sharding_of(&tensor) {
                    Some(sharding) => (sharding.logical().to_vec(), Some(sharding.rows())),
                    None => (own, None),
                };
                self.1.push(ShardedParameter { name, shape, rows: rows.map(|rows| [rows.start, rows.end]) });
            }
        }
        let mut walk = Walk(Path::default(), vec![]);
        Module::<B>::visit(model, &mut walk);
        walk.1
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

/// A parameter of a model that may be sharded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShardedParameter {
    /// Its path in the module tree.
    pub name: String,
    /// Of the whole.
    pub shape: Vec<usize>,
    /// The first row that this rank keeps, and the first that it does not; none if it keeps all.
    pub rows: Option<[usize; 2]>,
}

/// The linears of a model that can be sharded, the same on all ranks.
fn check<B: Float8Stack, M: Module<B>>(
    model: &M,
    comm: &Communicator,
    config: ShardConfig,
) -> Result<Vec<FoundLinear<B>>, ShardError> {
    if !comm.has_host_collectives() {
        return Err(ShardError::NeedsMpi);
    }
    let found = linears::<B, M>(model, None);
    let failed = |error: CommError| ShardError::Collective(error.to_string());
    let own = check_own::<B, M>(model, &found).and_then(|()| check_device::<B, M>(model, comm));
    comm.all_ok("the model to shard", own).map_err(failed)?;
    let parameters = Sharded::parameters::<B, M>(model);
    let parameters = parameters.iter().map(|p| format!("{} {:?}", p.name, p.shape));
    let linears = found.iter().map(|FoundLinear { info, tag, weight, .. }| {
        let policy = tag.as_ref().map(|tag| tag.layer.configured().to_string());
        format!("{} {:?} {}", info.name, weight.as_ref().map(|w| w.dtype()), policy.unwrap_or_default())
    });
    let texts: Vec<_> = parameters.chain(linears).chain([format!("{config:?}")]).collect();
    comm.agree("burn-float8's version", env!("CARGO_PKG_VERSION")).map_err(failed)?;
    comm.agree("what is to be sharded", &texts.join("\n")).map_err(failed)?;
    Ok(found)
}

/// NCCL's ranks are those of the model's device.
fn check_device<B: Float8Stack, M: Module<B>>(model: &M, comm: &Communicator) -> Result<(), ShardError> {
    if comm.engine() != Engine::Nccl || collectives::<B, M>(model, comm).is_some() {
        return Ok(());
    }
    let devices: Vec<_> = Module::<B>::devices(model).iter().map(|device| format!("{device:?}")).collect();
    Err(ShardError::OtherDevice { devices: devices.join(", ") })
}

fn check_own<B: Float8Stack, M: Module<B>>(model: &M, found: &[FoundLinear<B>]) -> Result<(), ShardError> {
    for FoundLinear { info, tag, weight, .. } in found {
        let name = || info.name.clone();
        let Some(weight) = weight else { return Err(ShardError::Quantized { name: name() }) };
        if tag.as_ref().is_some_and(|tag| tag.layer.sharding().is_some()) {
            return Err(ShardError::Sharded { name: name() });
        }
        if tag.as_ref().is_some_and(|tag| tag.layer.has_matmul()) {
            return Err(ShardError::Matmul { name: name() });
        }
        let dtype = weight.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(ShardError::Dtype { name: name(), dtype });
        }
    }
    struct HasEmbedding(Path, bool);
    impl<B: Backend> ModuleVisitor<B> for HasEmbedding {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.exit();
        }
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<B, D>>) {
            self.1 |= self.0.embedding(D).is_some();
        }
    }
    let mut embedding = HasEmbedding(Path::default(), false);
    Module::<B>::visit(model, &mut embedding);
    if found.is_empty() && !embedding.1 { Err(ShardError::NothingToShard) } else { Ok(()) }
}

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

/// What the rows of a shard are a multiple of.
pub(super) fn alignment(casts: Option<Casts>) -> usize {
    use float8_kernels::Granularity::{Block1x32, Block1x128, Block128x128};
    let is_block = |operand| {
        let cast = casts.map(|casts| casts.of(operand)).filter(|cast| !cast.is_disabled());
        cast.is_some_and(|cast| matches!(cast.scaling_granularity, Block1x32 | Block1x128 | Block128x128))
    };
    if [Operand::WEIGHT, Operand::WEIGHT_T].into_iter().any(is_block) { BLOCK } else { ALIGN }
}

struct Sharder {
    path: Path,
    config: ShardConfig,
    /// Of the model's linears.
    conversion: Option<Arc<Conversion>>,
    new: Sharded,
    /// Of the linears.
    layers: Vec<Arc<Layer>>,
}

impl<B: Float8Stack> ModuleMapper<B> for Sharder {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let tensor = param.val();
        let dims = tensor.dims();
        let elements = dims.iter().product::<usize>() as u64;
        let summary = &mut self.new.summary;
        summary.elements += elements;
        let tag = match tensor.into_primitive() {
            TensorPrimitive::Float(weight) => B::tag(&weight),
            TensorPrimitive::QFloat(_) => None,
        };
        let conversion = self.conversion.get_or_insert_default().clone();
        let linear = self.path.linear_weight(D, conversion.config());
        let high_precision = |name, reason| (name, Arc::new(Policy::HighPrecision(reason)), conversion.clone());
        let (name, policy, conversion) = match (tag, linear.or(self.path.embedding(D))) {
            (Some(tag), _) if D == 2 => {
                (tag.layer.name().to_string(), tag.layer.configured(), tag.layer.conversion().clone())
            }
            (_, Some(name)) if D == 2 => high_precision(name, Reason::Off),
            _ => {
                summary.replicated += 1;
                summary.elements_per_rank += elements;
                return param;
            }
        };
        let casts = policy.casts();
        let sharding = Sharding::new(self.new.comm.clone(), &name, [dims[0], dims[1]], alignment(casts), self.config);
        let sharding = Arc::new(sharding);
        summary.sharded += 1;
        let own = (sharding.chunk() * dims[1]) as u64;
        summary.elements_per_rank += own;
        summary.padding += own * summary.ranks as u64 - elements;
        let layer = Layer::new(name, Policy::clone(&policy), conversion).with_sharding(Some(sharding));
        let layer = Arc::new(layer);
        if casts.is_some() {
            self.layers.push(layer.clone());
        }
        map_param(param, move |t| shard::<B>(t, &layer))
    }
}

/// This rank's rows of a weight, which may be whole or those rows.
fn shard<B: Float8Stack>(weight: FloatTensor<B>, layer: &Arc<Layer>) -> FloatTensor<B> {
    let sharding = layer.sharding().expect("made with one").clone();
    let layer = layer.clone();
    B::map_float8(weight, move |weight| {
        let is_whole = weight.shape().to_vec() == sharding.logical();
        let rows = if is_whole { sharding.shard_of::<B::Inner>(weight.into_full()) } else { weight.into_full() };
        Float8Tensor::new(rows).tagged(Tag::new(layer))
    })
}

/// The sharded weights that are to be read in FP8.
fn float8_weights<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<ShardedWeight<B::Inner>> {
    let float8 = |FoundLinear { tag, weight, .. }: FoundLinear<B>| {
        let (Tag { layer, enabled, .. }, weight) = (tag?, B::float8_tensor(&weight?).clone());
        let is_read = enabled && layer.is_enabled() && layer.sharding().is_some();
        let config = layer.float8_config().filter(|_| is_read)?;
        Some(ShardedWeight { weight, layer, config })
    };
    linears::<B, M>(model, None).into_iter().filter_map(float8).collect()
}
