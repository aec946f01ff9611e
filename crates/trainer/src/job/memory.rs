//! Memory of a training step by formula: parts and a total for each rank, before anything is
//! allocated.
//!
//! ```text
//! loss               logits, their gradient, and the workspace of the output layer's gradient
//! backward begins    all activations that the layers keep, and the gradient of the output layer
//! backward ends      activations of the first layer, and the gradients of all parameters
//! optimizer          all gradients, and AdamW's temporaries for the largest parameter
//! ```
//! Parameters, moments and FP8 copies of weights are present throughout. So are the parameters and
//! moments of a checkpoint written in the background, once a step has replaced them.

use core::fmt;
use std::io::Write;

use anyhow::{Result, bail};
use burn::tensor::backend::Backend;
use device_select::SelectedDevice;
use serde::Serialize;

use super::build_model::compute_dtype;
use super::config::RunConfig;
use super::device_memory::{available, check_parameters, size, unit};
use super::memory_plan::plan;
use crate::activation_checkpoint::CheckpointingPlan;
use crate::config::StorageDtype;
use crate::model::{BatchShape, CausalLm, LayerBytes, ModelConfig, ModelSection};
use crate::optimizer::AT_ONCE;

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
}

impl MemoryEstimate {
    /// Bytes at each moment.
    pub fn moments(&self) -> [u64; 4] {
        std::array::from_fn(|moment| self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.bytes[moment])))
    }

    /// Peak bytes.
    pub fn peak(&self) -> u64 {
        self.moments().into_iter().fold(0, u64::max)
    }

    /// Largest size of a part.
    fn part(&self, name: &str) -> u64 {
        let part = self.parts.iter().find(|part| part.name == name);
        part.and_then(|part| part.bytes.into_iter().max()).unwrap_or(0)
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = unit(self.peak());
        writeln!(f, "memory of a training step{}, {name} at the moments of a step", on_ranks(self.ranks))?;
        write!(f, "{:<24}", "")?;
        MOMENTS.iter().try_for_each(|moment| write!(f, "  {moment:>15}"))?;
        let mut line = |name: &str, bytes: [u64; 4]| {
            write!(f, "\n{name:<24}")?;
            bytes.iter().try_for_each(|bytes| write!(f, "  {:>15.3}", *bytes as f64 / unit))
        };
        self.parts.iter().try_for_each(|part| line(part.name, part.bytes))?;
        line("in all", self.moments())
    }
}

fn on_ranks(ranks: usize) -> String {
    if ranks > 1 { format!(" on each of {ranks} ranks") } else { String::new() }
}

/// Prints the memory of a step. Warns if the device has less.
///
/// # Errors
/// The errors of the configuration, and a device that cannot hold the parameters.
pub(super) fn announce<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: &M::Config,
    ranks: usize,
    (selected, device): (&SelectedDevice, &B::Device),
    out: &mut dyn Write,
) -> Result<()> {
    let estimate = estimate::<B, M>(config, dims, ranks, selected, device)?;
    let [peak, parameters, gradients, moments] =
        [estimate.peak(), estimate.part("parameters"), estimate.part("gradients"), estimate.part("AdamW's moments")];
    let parts = [parameters, gradients, moments].map(size);
    let ranks = on_ranks(ranks);
    writeln!(
        out,
        "memory: a step takes about {}{ranks} (parameters {}, gradients {}, AdamW's moments {})",
        size(peak),
        parts[0],
        parts[1],
        parts[2]
    )?;
    check_parameters(parameters, selected)?;
    match available(selected) {
        Some(there) if peak > there => Ok(writeln!(out, "warning: {}", too_large(peak, there))?),
        _ => Ok(()),
    }
}

/// Prints the table of a step and whether it fits.
///
/// # Errors
/// A step that does not fit, and the errors of the configuration.
pub(super) fn tell(
    estimate: &MemoryEstimate,
    available_bytes: Option<u64>,
    selected: &SelectedDevice,
    out: &mut dyn Write,
) -> Result<()> {
    writeln!(out, "{estimate}\n")?;
    let peak = estimate.peak();
    match available_bytes.or_else(|| available(selected)) {
        None => writeln!(out, "peak: {}; how much {selected} has is unknown: --memory-gib says it", size(peak))?,
        Some(there) if peak > there => bail!(too_large(peak, there)),
        Some(there) => writeln!(out, "peak: {} of {}: fits", size(peak), size(there))?,
    }
    Ok(())
}

fn too_large(peak: u64, there: u64) -> String {
    format!(
        "a training step takes about {}, and there is {}: shorter sequences, a smaller training.batch_size with more \
         grad_accumulation, training.activation_checkpointing = \"full\", training.param_dtype = \"bf16\", optimizer.in_backward, \
         lora.base = \"fp8\" or more ranks take less; docs/guide/fine-tune.md#memory lists what saves how much",
        size(peak),
        size(there)
    )
}

/// Memory of a step of `config` on each of `ranks` ranks.
///
/// # Errors
/// The errors of the configuration, including FP8 filters that match no linear.
pub(super) fn estimate<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: &M::Config,
    ranks: usize,
    selected: &SelectedDevice,
    device: &B::Device,
) -> Result<MemoryEstimate> {
    let RunConfig { training, optimizer, checkpoint, .. } = config;
    let compute = compute_dtype::<B, _>(config, selected, device)??;
    let mesh = config.parallelism.mesh(ranks)?;
    let (plan, trained) = plan::<B, M>(config, dims, mesh, compute, device)?;
    let is_host = *selected == SelectedDevice::Cpu;
    let is_bf16 = training.param_dtype == StorageDtype::Bf16;
    // The CPU's GEMMs read and write f32.
    let widens = is_host && compute.size() < 4;
    let on_host = |bytes: f64| if is_host { bytes } else { 0.0 };
    let size = dims.size();
    let element = compute.size() as f64;
    let [rows, vocab, hidden] =
        [training.batch_size as f64 * training.seq_len as f64, size.vocab_size as f64, size.hidden_size as f64];
    // Attention keeps its output for backward: in f32 on the host. On a GPU a linear in high precision
    // keeps the same tensor.
    let attention_output = match is_host {
        true => 4,
        false if plan.input_bytes < element => element as u64,
        false => 0,
    };
    let shape = BatchShape {
        rows: rows as u64,
        element: compute.size() as u64,
        linear_input: plan.input_bytes,
        attention_output,
        ranks: mesh.tensor as u64,
    };
    let layer = dims.layer_bytes(&shape);
    // A linear with a frozen weight does not keep its input.
    let frozen = dims.layer_bytes(&BatchShape { linear_input: 0.0, ..shape });

    // Layers with a graph at once, and kept inputs of the others.
    let schedule = CheckpointingPlan::new(training, Some(size.vocab_size));
    let (graphs, inputs) = match schedule.group() {
        None => (size.num_layers.saturating_sub(trained.first), 0),
        Some(group) => (group.min(size.num_layers), size.num_layers.div_ceil(group)),
    };
    let full = trained.layers.min(graphs) as f64;
    let of_layers = |bytes: fn(&LayerBytes) -> u64| {
        let [bytes, frozen] = [&layer, &frozen].map(|layer| bytes(layer) as f64);
        let all = bytes * full + frozen * (graphs as f64 - full);
        match schedule.group() {
            Some(_) => [0.0, all, all, 0.0],
            None => [all, all, bytes * graphs.min(1) as f64, 0.0],
        }
    };
    let inputs = inputs as f64 * layer.input as f64;

    // Logits in f32 and, if hidden states are narrower, in their dtype, which the CPU's gradient
    // GEMMs read in f32; hidden states of all tokens and their gradient.
    // With tensor parallelism a rank has some tokens of hidden states, and some logits of each token;
    // `chunk` is of all ranks' tokens.
    let tensor = mesh.tensor as f64;
    let chunk = tensor * schedule.chunk().map_or(rows, |chunk| chunk as f64).min(rows / tensor);
    let narrow = if element < 4.0 { element + on_host(2.0 * element) } else { 0.0 };
    let logits = chunk * vocab / tensor * (8.0 + narrow) + 2.0 * element * hidden * (rows / tensor + chunk);

    // Tables: a rank's part in the parameters' dtype, and a whole one in f32, in which each rank
    // computes the gradient.
    let table = (training.param_dtype.dtype().size() as f64 * vocab * hidden / (mesh.shard as f64 * tensor)).floor();
    let wide = 4.0 * vocab * hidden / tensor;
    let is_tied = size.tie_word_embeddings;
    let has_head = if is_tied { trained.embedding } else { trained.output };
    let head = if has_head { table } else { 0.0 };
    let tables = head + if trained.embedding && !is_tied { table } else { 0.0 };
    // The output layer's gradient, the sum of its chunks, and on the CPU copies of weight and
    // gradient in f32. A tied table is transposed, which copies both.
    let bf16 = f64::from(u8::from(is_bf16));
    let chunks = if schedule.chunk().is_some() { 1.0 + bf16 } else { 0.0 };
    let widened = match is_host && (widens || is_bf16) {
        true if is_tied => 3.0 + bf16,
        true => 2.0,
        false => 0.0,
    };
    let head_workspace = if has_head { wide * (1.0 - 0.5 * bf16 + chunks + widened) } else { 0.0 };
    // The embedding's gradient is accumulated in f32, on the CPU in a copy of zeros. With
    // `in_backward`, the layers' gradients are already applied and freed.
    let applied = if optimizer.in_backward { plan.gradients as f64 - tables } else { 0.0 };
    let embedding_workspace = match trained.embedding {
        true => {
            wide + on_host(wide) - if is_host || !is_bf16 { table } else { 0.0 } + if is_tied { table } else { 0.0 }
        }
        false => 0.0,
    };

    // Operands of a GEMM in f32 on the CPU, or a weight's gradient before it is rounded to bf16;
    // gradients that flow through a layer.
    let gradients = plan.gradients as f64;
    let [largest_update, largest_weight] = plan.largest.map(|elements| elements as f64);
    let widest = (layer.swiglu as f64 / (2.0 * element * rows)).floor();
    let decoded = on_host(4.0 * (largest_weight + rows * widest));
    let rounded = on_host(2.0 * (2.0 * largest_weight).min(gradients) * bf16);
    let of_layer = layer.swiglu.max(layer.attention) as f64 * if widens { 2.0 } else { 1.0 };
    let backward = decoded.max(rounded) + 4.0 * rows * hidden + of_layer;

    // Updates are in place, except where wgpu rounds to bf16: about ten tensors of the rows being
    // rounded, and all new tensors.
    let rounds = [training.param_dtype, optimizer.state_dtype].contains(&StorageDtype::Bf16);
    let update = match selected {
        SelectedDevice::Wgpu(_) if rounds => 40.0 * largest_update.min(AT_ONCE as f64) + 6.0 * largest_update,
        _ => 0.0,
    };
    // Copies made by an exchange of gradients: three on the CPU, two of them in MPI; two on a
    // device. While ranks sum a shard's gradient, the next one is computed.
    let exchanged = plan.largest_gradient.max(plan.joined_gradients) as f64 * if ranks > 1 { 1.0 } else { 0.0 };
    let in_flight = if mesh.shard > 1 { plan.largest_gradient } else { 0 };
    let reduced = exchanged * if is_host { 3.0 } else { 2.0 } + in_flight as f64;
    let earlier = if training.grad_accumulation > 1 { gradients } else { 0.0 };
    let gradients = match optimizer.in_backward {
        true => [0.0, gradients - (tables - head), gradients, tables],
        false => [earlier, earlier + head, earlier + gradients, gradients],
    };
    // Replaced tensors live until the checkpoint is written. Frozen parameters are not replaced.
    let in_background = checkpoint.output_dir.is_some() && checkpoint.background;
    let written = if in_background { plan.trained + plan.moments + plan.masters } else { 0 };
    let copies = plan.copies.saturating_sub(if is_host { plan.shared_copies } else { 0 });
    let always = |bytes: u64| [bytes as f64; 4];
    let parts = [
        ("parameters", always(plan.parameters)),
        ("AdamW's moments", always(plan.moments)),
        ("AdamW's masters", always(plan.masters)),
        ("checkpoint being written", always(written)),
        ("FP8 copies of weights", always(copies)),
        ("gathered weights", always(plan.gathered)),
        ("gradients", gradients),
        ("inputs of layers", [inputs, inputs, layer.input as f64, 0.0]),
        ("residual stream", of_layers(|layer| layer.residual)),
        ("attention", of_layers(|layer| layer.attention)),
        ("mlp", of_layers(|layer| layer.mlp)),
        ("logits", [logits, 0.0, 0.0, 0.0]),
        ("workspace", [head_workspace, backward, backward.max(embedding_workspace - applied), update]),
        ("reduction", [if has_head { reduced } else { 0.0 }, reduced, reduced, 0.0]),
    ];
    // Values beyond 64 bits saturate.
    let parts = parts.map(|(name, bytes)| MemoryPart { name, bytes: bytes.map(|bytes| bytes as u64) });
    let parts = parts.into_iter().filter(|part| part.bytes != [0; 4]).collect();
    Ok(MemoryEstimate { ranks, parts })
}
