//! [`Sharder`]: of each parameter the rows that a rank keeps, or all of it.
use std::sync::Arc;

use burn::module::{ModuleMapper, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use float8_comm::Communicator;
use serde::Serialize;

use super::walk::{Path, map_param};
use crate::config::{Casts, Policy};
use crate::layer::{Conversion, Layer, Tag};
use crate::sharding::{ShardConfig, ShardError, Sharding};
use crate::stack::Float8Stack;
use crate::tensor::Float8Tensor;
use crate::terms::{Operand, Reason};

/// Rows of a shard are a multiple of what one scale covers.
const BLOCK: usize = 128;

/// Rows of a shard where no block of scales asks for more: codes then come in whole words, and rows of the transpose in 16 bytes.
const ALIGN: usize = 16;

/// What [`Sharded::apply`](super::Sharded::apply) did; its `Display` is a line.
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

/// What the rows of a shard are a multiple of.
pub(super) fn alignment(casts: Option<Casts>) -> usize {
    use float8_kernels::Granularity::{Block1x32, Block1x128, Block128x128};
    let is_block = |operand| {
        let cast = casts.map(|casts| casts.of(operand)).filter(|cast| !cast.is_disabled());
        cast.is_some_and(|cast| matches!(cast.scaling_granularity, Block1x32 | Block1x128 | Block128x128))
    };
    if [Operand::WEIGHT, Operand::WEIGHT_T].into_iter().any(is_block) { BLOCK } else { ALIGN }
}

/// Replaces the parameters that are sharded by this rank's rows.
pub(super) struct Sharder {
    path: Path,
    comm: Communicator,
    config: ShardConfig,
    /// Of the model's linears.
    conversion: Option<Arc<Conversion>>,
    summary: ShardSummary,
    /// Of the linears.
    layers: Vec<Arc<Layer>>,
}

impl Sharder {
    /// For a model whose linears have this conversion, if any has one.
    pub(super) fn new(comm: &Communicator, config: ShardConfig, conversion: Option<Arc<Conversion>>) -> Self {
        let summary = ShardSummary { ranks: comm.world_size(), ..ShardSummary::default() };
        Self { path: Path::default(), comm: comm.clone(), config, conversion, summary, layers: vec![] }
    }

    /// What was done, and the layers of the linears that are sharded now.
    pub(super) fn finish(self) -> (ShardSummary, Vec<Arc<Layer>>) {
        (self.summary, self.layers)
    }
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
        let summary = &mut self.summary;
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
        let sharding = Sharding::new(self.comm.clone(), &name, [dims[0], dims[1]], alignment(casts), self.config);
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

/// This rank's rows of a weight, which may be whole or those rows; anything else, as from a record of another model or of another
/// number of ranks, is a panic, as it is in Burn.
fn shard<B: Float8Stack>(weight: FloatTensor<B>, layer: &Arc<Layer>) -> FloatTensor<B> {
    let sharding = layer.sharding().expect("made with one").clone();
    let layer = layer.clone();
    B::map_float8(weight, move |weight| {
        let (shape, whole, rows) =
            (weight.shape().to_vec(), sharding.logical(), [sharding.chunk(), sharding.logical()[1]]);
        let is_whole = shape == whole;
        if !is_whole && shape != rows {
            let name = layer.name().into();
            panic!("{}", ShardError::Shape { name, got: shape, whole, rows, ranks: sharding.ranks() });
        }
        let rows = if is_whole { sharding.shard_of::<B::Inner>(weight.into_full()) } else { weight.into_full() };
        Float8Tensor::new(rows).tagged(Tag::new(layer))
    })
}
