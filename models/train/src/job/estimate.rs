//! [`MemoryEstimate`]: memory of a training step, by part and by moment, before anything is
//! allocated.
//!
//! ```text
//! loss               logits, their gradient, and the workspace of the output layer's gradient
//! backward begins    all activations that the layers keep, and the gradient of the output layer
//! backward ends      activations of the first layer, and the gradients of all parameters
//! optimizer          all gradients, and AdamW's temporaries for the largest parameter
//! ```
//! Parameters, moments and FP8 copies of weights are present throughout. So are the parameters and
//! moments of a checkpoint written in the background, once a step has replaced them. M is the
//! number of tokens of a micro-batch. Arithmetic saturates at 64 bits.

use core::fmt;
use std::num::Saturating;

use burn::tensor::DType;
use float8_shard::ShardPlan;
use serde::Serialize;

use super::device_memory::unit;
use crate::config::{CheckpointSection, OptimizerSection, StorageDtype, TrainingSection};
use crate::model::{BatchShape, LayerBytes, ModelConfig, ModelSize};
use crate::optimizer::AT_ONCE;
use crate::activation_checkpoint::Plan;

/// Moments of a step.
const MOMENTS: [&str; 4] = ["loss", "backward begins", "backward ends", "optimizer"];

/// Part of a step's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// Name in the table.
    pub name: &'static str,
    /// Bytes at each moment.
    pub bytes: [u64; 4],
}

/// Bytes of a training step on each rank; its `Display` is a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Number of ranks.
    pub ranks: usize,
    /// Parts of the memory.
    pub parts: Vec<MemoryPart>,
    /// Bytes of the whole model in f32, which each of several ranks holds before the first step; 0
    /// in a single process.
    pub whole: u64,
}

/// Trained parts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trained {
    /// First layer with a graph if there is no activation checkpointing; nothing below it is
    /// trained.
    pub(super) first: usize,
    /// Layers with trained parameters.
    pub(super) layers: usize,
    /// Whether the embedding is trained.
    pub(super) embedding: bool,
    /// Whether an untied output layer is trained.
    pub(super) output: bool,
}

/// Inputs of an estimate.
#[derive(Clone, Copy)]
pub(super) struct Estimated<'a, C> {
    pub(super) training: &'a TrainingSection,
    pub(super) optimizer: &'a OptimizerSection,
    pub(super) checkpoint: &'a CheckpointSection,
    pub(super) dims: &'a C,
    pub(super) plan: &'a ShardPlan,
    pub(super) dtype: DType,
    /// Whether the CPU backend computes.
    pub(super) is_host: bool,
    pub(super) trained: Trained,
}

impl<C: ModelConfig> Estimated<'_, C> {
    /// Estimates the memory; `None` if the model does not report the bytes of its layers.
    pub(super) fn estimate(&self) -> Option<MemoryEstimate> {
        let Self { training, optimizer, dims, plan, is_host, trained, .. } = *self;
        let rows = Saturating(training.batch_size as u64) * Saturating(training.seq_len as u64);
        let element = self.dtype.size() as u64;
        let shape = BatchShape {
            rows: rows.0,
            element,
            linear_input: plan.input_bytes,
            attention_output: if is_host { 4 } else { 0 },
        };
        let layer = dims.layer_bytes(&shape)?;
        // A linear with a frozen weight does not keep its input.
        let frozen = dims.layer_bytes(&BatchShape { linear_input: 0.0, ..shape })?;
        let ModelSize { vocab_size, hidden_size, num_layers, tie_word_embeddings, .. } = dims.size();
        let [zero, element, two, four] = [0, element, 2, 4].map(Saturating);
        let [vocab, hidden, layers] = [vocab_size, hidden_size, num_layers].map(|size| Saturating(size as u64));
        let schedule = Plan::new(training, Some(vocab_size));
        let in_graph = num_layers.saturating_sub(trained.first);
        let is_checkpointed = schedule.group().is_some();
        // Layers with a graph at once, and kept inputs of the others.
        let (graphs, inputs) = match schedule.group() {
            None => (in_graph, zero),
            Some(group) => (group.min(num_layers), Saturating(layers.0.div_ceil(group as u64))),
        };
        let full = trained.layers.min(graphs);
        let [full, light, one] = [full, graphs - full, graphs.min(1)].map(|count| Saturating(count as u64));
        let of_layers = |bytes: u64, frozen: u64| {
            let (bytes, frozen) = (Saturating(bytes), Saturating(frozen));
            let all = bytes * full + frozen * light;
            [if is_checkpointed { zero } else { all }, all, if is_checkpointed { all } else { bytes * one }, zero]
        };

        let chunk = schedule.chunk().map_or(rows, |chunk| Saturating(chunk as u64));
        // Logits in f32 and, if hidden states are narrower, in their dtype; hidden states of all
        // tokens and their gradient.
        let narrow = if element < four { element } else { zero };
        // The CPU's gradient GEMMs read the logits in f32.
        let read = if is_host { narrow * two } else { zero };
        let logits = chunk * vocab * (four + four + narrow + read)
            + rows * hidden * two * element
            + chunk * hidden * two * element;
        // Gradient of the embedding or of the output layer; a rank has only its rows.
        let table =
            Saturating(training.param_dtype.dtype().size() as u64) * vocab * hidden / Saturating(plan.ranks as u64);
        let has_head = if tie_word_embeddings { trained.embedding } else { trained.output };
        let head_gradient = if has_head { table } else { zero };
        let embedding_gradient = if trained.embedding { table } else { zero };
        // Gradients of both tables as the optimizer sees them.
        let tables = if tie_word_embeddings { head_gradient } else { head_gradient + embedding_gradient };
        let of_tables = OfTables {
            table,
            wide: four * vocab * hidden,
            head: has_head,
            embedding: trained.embedding,
            is_tied: tie_word_embeddings,
            is_chunked: schedule.chunk().is_some(),
            is_bf16: training.param_dtype == StorageDtype::Bf16,
            is_host,
            widens: self.widens(),
        };
        // With `in_backward`, the layers' gradients are already applied and freed.
        let applied = if optimizer.in_backward { Saturating(plan.gradients) - tables } else { zero };
        let of_embedding = of_tables.of_embedding() - applied;
        let backward = self.backward_workspace(&layer, rows, hidden);
        let copies = if is_host { plan.copies.saturating_sub(plan.shared_copies) } else { plan.copies };
        let LayerBytes { input, residual, attention, mlp, .. } = layer;
        let waiting = inputs * Saturating(input);
        let reduced = self.exchanged();
        let [parameters, moments, masters, copies, gathered] =
            [plan.parameters, plan.moments, plan.masters, copies, plan.gathered].map(Saturating);
        let parts = [
            ("parameters", [parameters; 4]),
            ("AdamW's moments", [moments; 4]),
            ("AdamW's masters", [masters; 4]),
            ("checkpoint being written", [self.being_written(); 4]),
            ("FP8 copies of weights", [copies; 4]),
            ("gathered weights", [gathered; 4]),
            ("gradients", self.gradients(head_gradient, tables)),
            ("inputs of layers", [waiting, waiting, Saturating(input), zero]),
            ("residual stream", of_layers(residual, frozen.residual)),
            ("attention", of_layers(attention, frozen.attention)),
            ("mlp", of_layers(mlp, frozen.mlp)),
            ("logits", [logits, zero, zero, zero]),
            ("workspace", [of_tables.of_head(), backward, backward.max(of_embedding), self.update_workspace()]),
            ("reduction", [if has_head { reduced } else { zero }, reduced, reduced, zero]),
        ];
        let parts = parts.into_iter().map(|(name, bytes)| MemoryPart { name, bytes: bytes.map(|bytes| bytes.0) });
        let parts = parts.filter(|part| part.bytes != [0; 4]).collect();
        let whole = if plan.ranks > 1 { plan.whole } else { 0 };
        Some(MemoryEstimate { ranks: plan.ranks, parts, whole })
    }

    /// Whether the CPU computes in bf16; its GEMMs then read and write f32.
    fn widens(&self) -> bool {
        self.is_host && self.dtype.size() < 4
    }

    /// Bytes of gradients at each moment. `head` is the part of the output layer, `tables` includes
    /// the embedding's.
    fn gradients(&self, head: Saturating<u64>, tables: Saturating<u64>) -> [Saturating<u64>; 4] {
        let (zero, planned) = (Saturating(0), Saturating(self.plan.gradients));
        let earlier = if self.training.grad_accumulation > 1 { planned } else { zero };
        match self.optimizer.in_backward {
            // `plan.gradients` then covers one group of layers and the parameters outside of
            // layers.
            true => [zero, planned - (tables - head), planned, tables],
            false => [earlier, earlier + head, earlier + planned, planned],
        }
    }

    /// Bytes of temporaries in the backward of a layer of `rows` tokens.
    fn backward_workspace(
        &self,
        layer: &LayerBytes,
        rows: Saturating<u64>,
        hidden: Saturating<u64>,
    ) -> Saturating<u64> {
        let Self { training, plan, is_host, .. } = *self;
        let [zero, two, four] = [0, 2, 4].map(Saturating);
        let largest_weight = Saturating(plan.largest[1]);
        // Operands of a GEMM in f32 on the CPU, and gradients that flow through a layer.
        let widest = Saturating(widest(layer, rows.0, self.dtype.size() as u64));
        let decoded = if is_host { four * (largest_weight + rows * widest) } else { zero };
        let of_layer = Saturating(layer.swiglu.max(layer.attention));
        let through = four * rows * hidden + if self.widens() { two * of_layer } else { of_layer };
        // Attention's blocks of scores: a few tensors of at most 64 MiB, for heads of at least 8
        // columns. On the CPU they stay in its caches.
        let all_scores = four * rows * Saturating(training.seq_len as u64) * Saturating(hidden.0 / 8);
        let scores = if is_host { zero } else { four * all_scores.min(Saturating(1 << 26)) };
        // A weight's gradient is computed in f32 before it is rounded to bf16: twice its bytes.
        let is_rounded = is_host && training.param_dtype == StorageDtype::Bf16;
        let rounded = if is_rounded { two * (two * largest_weight).min(Saturating(plan.gradients)) } else { zero };
        decoded.max(rounded) + through + scores
    }

    /// Bytes of temporaries for the update of the largest parameter. Without rounding: the new
    /// parameter or a moment next to the old one. With rounding: about ten tensors of the rows
    /// being rounded, and all new tensors. The CPU updates in place.
    fn update_workspace(&self) -> Saturating<u64> {
        let largest = Saturating(self.plan.largest[0]);
        let is_rounded = [self.training.param_dtype, self.optimizer.state_dtype].contains(&StorageDtype::Bf16);
        match is_rounded {
            _ if self.is_host => Saturating(0),
            true => Saturating(10 * 4) * largest.min(Saturating(AT_ONCE as u64)) + Saturating(6) * largest,
            false => Saturating(4) * largest,
        }
    }

    /// Bytes of copies made by an exchange of gradients: for the largest gradient, or for joined
    /// gradients. The CPU makes three, two of them in MPI; a device makes two.
    fn exchanged(&self) -> Saturating<u64> {
        let plan = self.plan;
        let exchanged = plan.largest_gradient.max(plan.joined_gradients);
        Saturating(if plan.ranks == 1 { 0 } else { exchanged }) * Saturating(if self.is_host { 3 } else { 2 })
    }

    /// Bytes of replaced tensors that live until the checkpoint is written. Frozen parameters are
    /// not replaced.
    fn being_written(&self) -> Saturating<u64> {
        let Self { checkpoint, plan, .. } = *self;
        match checkpoint.folder.is_some() && checkpoint.background {
            true => [plan.trained, plan.moments, plan.masters].map(Saturating).into_iter().sum(),
            false => Saturating(0),
        }
    }
}

/// Memory for computing the gradients of the two tables, the embedding and the output layer.
struct OfTables {
    /// Bytes of a rank's part of a table in the parameters' dtype.
    table: Saturating<u64>,
    /// Bytes of a whole table in f32; each rank computes the whole gradient.
    wide: Saturating<u64>,
    /// Whether the output layer has a gradient.
    head: bool,
    /// Whether the embedding has a gradient.
    embedding: bool,
    /// Whether both share one table.
    is_tied: bool,
    /// Whether the output layer is computed in chunks of tokens.
    is_chunked: bool,
    /// Whether parameters are in bf16.
    is_bf16: bool,
    /// Whether the CPU backend computes.
    is_host: bool,
    /// Whether the CPU computes in bf16, with f32 copies for its GEMMs.
    widens: bool,
}

impl OfTables {
    /// Bytes after the loss: the output layer's gradient and the sum of its chunks in f32. If
    /// weights or GEMMs are in bf16, the CPU also holds the weight and the gradient in f32. A tied
    /// table is transposed, which copies both.
    fn of_head(&self) -> Saturating<u64> {
        let times = |count: u64| Saturating(count) * self.wide;
        if !self.head {
            return Saturating(0);
        }
        let sums = if self.is_chunked { times(1 + u64::from(self.is_bf16)) } else { times(0) };
        let in_f32 = match self.is_host && (self.widens || self.is_bf16) {
            false => times(0),
            true if self.is_tied => times(3 + u64::from(self.is_bf16)),
            true => times(2),
        };
        let whole = if self.is_bf16 { self.wide / Saturating(2) } else { self.wide };
        whole + sums + in_f32
    }

    /// Bytes after the layers' backward, in addition to the embedding's gradient. It is accumulated
    /// in f32, on the CPU in a copy of zeros. With a tied table, the output layer's gradient is
    /// still in memory.
    fn of_embedding(&self) -> Saturating<u64> {
        let of_head = if self.is_tied { self.table } else { Saturating(0) };
        match (self.embedding, self.is_host) {
            (false, _) => Saturating(0),
            (true, true) => self.wide + self.wide - self.table + of_head,
            (true, false) if self.is_bf16 => self.wide + of_head,
            (true, false) => self.wide - self.table + of_head,
        }
    }
}

/// Columns of a layer's widest operand, from the bytes kept by SwiGLU: gate and up are two tensors.
fn widest(layer: &LayerBytes, rows: u64, element: u64) -> u64 {
    layer.swiglu / 2_u64.saturating_mul(element).saturating_mul(rows).max(1)
}

impl MemoryEstimate {
    /// Bytes at each moment.
    pub fn moments(&self) -> [u64; 4] {
        std::array::from_fn(|moment| self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.bytes[moment])))
    }

    /// Peak bytes, including the time before the first step.
    pub fn peak(&self) -> u64 {
        self.moments().into_iter().fold(self.whole, u64::max)
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.ranks > 1 { format!(" on each of {} ranks", self.ranks) } else { String::new() };
        let (unit, name) = unit(self.peak());
        writeln!(f, "memory of a training step{whose}, {name} at the moments of a step")?;
        write!(f, "{:<24}", "")?;
        MOMENTS.iter().try_for_each(|moment| write!(f, "  {moment:>15}"))?;
        let mut line = |name: &str, bytes: [u64; 4]| {
            write!(f, "\n{name:<24}")?;
            bytes.iter().try_for_each(|bytes| write!(f, "  {:>15.3}", *bytes as f64 / unit))
        };
        self.parts.iter().try_for_each(|part| line(part.name, part.bytes))?;
        line("in all", self.moments())?;
        match self.whole {
            0 => Ok(()),
            whole => {
                write!(f, "\nbefore the first step, the whole model in f32: {:.3}", whole as f64 / unit)
            }
        }
    }
}
