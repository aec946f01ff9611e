//! The memory that a model and its training take, told and compared with what there is before any of it is allocated.

use std::collections::BTreeMap;
use std::io::Write;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use device_select::SelectedDevice;
use float8_shard::{PlanDtypes, Reshard, ShardConfig, ShardPlan};

use super::config::RunConfig;
use crate::config::{ActivationCheckpointing, ParallelismSection, Precision};
use crate::metrics::Memory;
use crate::model::{CausalLm, ModelConfig, ModelSection};
use crate::{JobError, ModulePath};

/// How a run shards its model.
pub(super) fn shard_config<S>(config: &RunConfig<S>) -> ShardConfig {
    let ParallelismSection { reshard, reduce_dtype } = config.parallelism;
    ShardConfig { reshard, reduce_dtype }
}

/// What each of so many ranks would hold of the run of `config`; nothing of it is allocated.
///
/// # Errors
/// The errors of the configuration, also of FP8 filters that no linear has.
pub(super) fn plan<B: Backend, M: CausalLm<B>>(
    config: &RunConfig<impl ModelSection<Config = M::Config>>,
    dims: M::Config,
    ranks: usize,
    dtype: DType,
    device: &B::Device,
) -> Result<ShardPlan, JobError> {
    let dtypes = PlanDtypes {
        compute: dtype,
        matrices: config.training.param_dtype.dtype(),
        moments: config.optimizer.state_dtype.dtype(),
    };
    // A tied output gathers the table once more, in its own dtype, and keeps it until backward.
    let is_kept = config.parallelism.reshard == Reshard::AfterStep && dtype == dtypes.matrices;
    let size = dims.size();
    let tied = match size.tie_word_embeddings && ranks > 1 && !is_kept {
        true => (size.vocab_size * size.hidden_size * dtype.size()) as u64,
        false => 0,
    };
    let float8 = (config.training.precision == Precision::Fp8).then(|| config.float8(&dims));
    // Tables of positions are no parameters.
    let model = M::new(dims.with_max_seq_len(1), device)?;
    let plan = ShardPlan::new::<B, _>(&model, ranks, shard_config(config), float8.as_ref(), dtypes)?;
    let gradients = match config.optimizer.in_backward {
        true => gradients_at_once::<B, _>(&model, config.training.activation_checkpointing, dtypes.matrices),
        false => plan.gradients,
    };
    Ok(ShardPlan { gathered: plan.gathered + tied, gradients, ..plan })
}

/// Bytes of gradients that are in memory at once where they are applied in backward: those of a group of layers, and of what is in no
/// layer, as the output and the embedding.
fn gradients_at_once<B: Backend, M: Module<B>>(model: &M, group: ActivationCheckpointing, matrices: DType) -> u64 {
    struct Layers {
        path: ModulePath,
        matrices: DType,
        /// Bytes by the path to the first number in it, if there is one.
        bytes: BTreeMap<Option<String>, u64>,
    }
    impl<B: Backend> ModuleVisitor<B> for Layers {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let path = self.path.dotted();
            let names: Vec<_> = path.split('.').collect();
            let number = names.iter().position(|name| name.parse::<usize>().is_ok());
            let kept = if D < 2 { DType::F32 } else { self.matrices }.size();
            let layer = number.map(|number| names[..=number].join("."));
            *self.bytes.entry(layer).or_default() += (kept * param.lazy_shape().num_elements()) as u64;
        }
    }
    let mut layers = Layers { path: ModulePath::default(), matrices, bytes: BTreeMap::new() };
    model.visit(&mut layers);
    let others = layers.bytes.remove(&None).unwrap_or(0);
    let at_once = match group {
        ActivationCheckpointing::None => usize::MAX,
        ActivationCheckpointing::Every(layers) => layers.get(),
    };
    let mut sizes: Vec<_> = layers.bytes.into_values().collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    others + sizes.iter().take(at_once).sum::<u64>()
}

/// Says what training takes.
///
/// # Errors
/// [`JobError::Memory`] if the machine does not have it, [`JobError::Output`].
pub(super) fn announce(plan: &ShardPlan, selected: &SelectedDevice, out: &mut dyn Write) -> Result<(), JobError> {
    if plan.ranks > 1 {
        writeln!(out, "{plan}")?;
        return check(plan.total().max(plan.whole), "a rank", selected);
    }
    let ShardPlan { parameters, gradients, moments, .. } = *plan;
    let all = parameters + gradients + moments;
    let [all_text, parameters, gradients, moments] = [all, parameters, gradients, moments].map(gib);
    writeln!(
        out,
        "memory: {all_text} without activations (parameters {parameters}, gradients {gradients}, AdamW's moments {moments})"
    )?;
    check(all, "training", selected)
}

/// Refuses a model whose parameters the machine has no room for.
///
/// # Errors
/// [`JobError::Memory`].
pub(super) fn check_parameters<C: ModelConfig>(dims: &C, selected: &SelectedDevice) -> Result<(), JobError> {
    check(4 * dims.size().num_params as u64, "the model", selected)
}

/// Compares with the machine's memory, if the model is to be in that: how much a GPU has, nothing here tells.
fn check(needed: u64, what: &'static str, selected: &SelectedDevice) -> Result<(), JobError> {
    match Memory::of_machine().filter(|_| *selected == SelectedDevice::Cpu) {
        Some(there) if needed > there => Err(JobError::Memory { what, needed: gib(needed), there: gib(there) }),
        _ => Ok(()),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64)
}
