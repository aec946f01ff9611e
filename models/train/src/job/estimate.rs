//! [`MemoryEstimate`]: the memory of a training step, by what takes it and when, before anything is allocated.
//!
//! ```text
//! loss               logits and their gradient, after the layers' forward
//! backward begins    all that the layers keep, and the gradient of the output layer
//! backward ends      what the first layer keeps, and the gradients of all parameters
//! optimizer          all gradients, and what AdamW makes of the largest parameter
//! ```
//! Parameters, moments and FP8 copies of weights are there throughout. M tokens are a micro-batch.

use core::fmt;

use burn::tensor::DType;
use float8_shard::ShardPlan;
use serde::Serialize;

use crate::config::{OptimizerSection, StorageDtype, TrainingSection};
use crate::model::{BatchShape, LayerBytes, ModelConfig, ModelSize};
use crate::optimizer::AT_ONCE;
use crate::recompute::Plan;

/// When in a step.
const MOMENTS: [&str; 4] = ["loss", "backward begins", "backward ends", "optimizer"];

/// What takes memory in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// What it is.
    pub name: &'static str,
    /// Bytes at each moment.
    pub bytes: [u64; 4],
}

/// Bytes of a training step on each rank; its `Display` is a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Ranks.
    pub ranks: usize,
    /// What takes it.
    pub parts: Vec<MemoryPart>,
}

/// What an estimate is made from.
#[derive(Clone, Copy)]
pub(super) struct Estimated<'a, C> {
    pub(super) training: &'a TrainingSection,
    pub(super) optimizer: &'a OptimizerSection,
    pub(super) dims: &'a C,
    pub(super) plan: &'a ShardPlan,
    pub(super) dtype: DType,
    /// Computed by the CPU backend.
    pub(super) is_host: bool,
    /// Adapters are trained, and the model is not.
    pub(super) is_frozen: bool,
}

impl<C: ModelConfig> Estimated<'_, C> {
    /// The estimate; none if the model does not say what its layers keep.
    pub(super) fn estimate(&self) -> Option<MemoryEstimate> {
        let Self { training, optimizer, dims, plan, is_host, is_frozen, .. } = *self;
        let element = self.dtype.size() as u64;
        let rows = (training.batch_size * training.seq_len) as u64;
        let shape =
            BatchShape { rows, element, linear_input: plan.input_bytes, attention_output: if is_host { 4 } else { 0 } };
        let (layers, layer) = dims.layer_bytes(&shape)?;
        let ModelSize { vocab_size, hidden_size, tie_word_embeddings, .. } = dims.size();
        let (vocab, hidden) = (vocab_size as u64, hidden_size as u64);
        let schedule = Plan::new(training, Some(vocab_size));
        let layers = layers as u64;
        // Layers that have a graph at once, and inputs of others that wait.
        let (graphs, inputs) = match schedule.group() {
            None => (layers, 0),
            Some(group) => ((group as u64).min(layers), layers.div_ceil(group as u64)),
        };
        let is_checkpointed = schedule.group().is_some();
        let of_layers = |bytes: u64| {
            let all = bytes * graphs;
            [if is_checkpointed { 0 } else { all }, all, if is_checkpointed { all } else { bytes }, 0]
        };

        let chunk = schedule.chunk().map_or(rows, |chunk| chunk as u64);
        // f32 and, if hidden states are narrower, in their dtype; the hidden states of all tokens and their gradient.
        let narrow = if element < 4 { element } else { 0 };
        let logits = chunk * vocab * (4 + 4 + narrow) + rows * hidden * 2 * element + chunk * hidden * 2 * element;
        // Of the embedding, or of the output: their gradients.
        let table = if is_frozen { 0 } else { training.param_dtype.dtype().size() as u64 * vocab * hidden };
        let head_gradient = if tie_word_embeddings { 0 } else { table };
        let earlier = if training.grad_accumulation > 1 { plan.gradients } else { 0 };
        let gradients = match optimizer.in_backward {
            // The plan's are those of a group of layers and of what is in none.
            true => [0, plan.gradients.saturating_sub(table), plan.gradients, head_gradient + table],
            false => [earlier, earlier + head_gradient, earlier + plan.gradients, plan.gradients],
        };
        let [largest, largest_weight] = plan.largest;
        // Operands of a GEMM in f32 on the CPU, and gradients on their way through a layer.
        let decoded = if is_host { 4 * (largest_weight + rows * widest(&layer, rows, element)) } else { 0 };
        let through = 4 * rows * hidden + layer.mlp.max(layer.attention);
        // Attention's blocks of scores, some tensors of 64 MiB at most; the CPU's stay in its caches.
        let scores = if is_host { 0 } else { 4 << 26 };
        let backward = decoded + through + scores;
        // The new parameter or a moment beside the old one; where that is rounded, some ten tensors of the rows that are, and all new ones.
        // The CPU changes them where they lie.
        let is_rounded = [training.param_dtype, optimizer.state_dtype].contains(&StorageDtype::Bf16);
        let update = match is_rounded {
            _ if is_host => 0,
            true => 10 * 4 * largest.min(AT_ONCE as u64) + 6 * largest,
            false => 4 * largest,
        };
        let copies = if is_host { plan.copies - plan.shared_copies } else { plan.copies };
        let copies = if plan.ranks > 1 { plan.gathered } else { copies };
        let LayerBytes { input, residual, attention, mlp } = layer;
        let waiting = inputs * input;
        let parts = [
            ("parameters", [plan.parameters; 4]),
            ("AdamW's moments", [plan.moments; 4]),
            ("FP8 copies of weights", [copies; 4]),
            ("gradients", gradients),
            ("inputs of layers", [waiting, waiting, input, 0]),
            ("residual stream", of_layers(residual)),
            ("attention", of_layers(attention)),
            ("mlp", of_layers(mlp)),
            ("logits", [logits, 0, 0, 0]),
            ("workspace", [0, backward, backward, update]),
            ("reduction", [0, 0, if plan.ranks > 1 { plan.largest_gradient } else { 0 }, 0]),
        ];
        let parts = parts.into_iter().map(|(name, bytes)| MemoryPart { name, bytes });
        let parts = parts.filter(|part| part.bytes != [0; 4]).collect();
        Some(MemoryEstimate { ranks: plan.ranks, parts })
    }
}

/// Columns of the widest operand of a layer, from what its SwiGLU keeps: gate and up are two tensors.
fn widest(layer: &LayerBytes, rows: u64, element: u64) -> u64 {
    layer.mlp / (2 * element * rows).max(1)
}

impl MemoryEstimate {
    /// Bytes at each moment.
    pub fn moments(&self) -> [u64; 4] {
        std::array::from_fn(|moment| self.parts.iter().map(|part| part.bytes[moment]).sum())
    }

    /// Bytes at the worst moment.
    pub fn peak(&self) -> u64 {
        self.moments().into_iter().max().unwrap_or_default()
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.ranks > 1 { format!(" on each of {} ranks", self.ranks) } else { String::new() };
        writeln!(f, "memory of a training step{whose}, GiB at the moments of a step")?;
        write!(f, "{:<24}", "")?;
        MOMENTS.iter().try_for_each(|moment| write!(f, "  {moment:>15}"))?;
        let mut line = |name: &str, bytes: [u64; 4]| {
            write!(f, "\n{name:<24}")?;
            bytes.iter().try_for_each(|bytes| write!(f, "  {:>15.3}", *bytes as f64 / f64::from(1 << 30)))
        };
        self.parts.iter().try_for_each(|part| line(part.name, part.bytes))?;
        line("in all", self.moments())
    }
}
