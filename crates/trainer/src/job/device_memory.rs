//! Memory of a device, and sizes as the log prints them.

use anyhow::{Result, bail};
use device_select::{AdapterInfo, SelectedDevice};

use super::config::RunConfig;
use crate::metrics::Memory;
use crate::model::{ModelConfig, ModelSection, ModelSize};

/// Bytes of a model's parameters: values in the dtype of `config`, or FP8 codes.
pub(super) fn parameter_bytes<S: ModelSection>(config: &RunConfig<S>, dims: &S::Config) -> u64 {
    let ModelSize { num_params, vocab_size, hidden_size, tie_word_embeddings, .. } = dims.size();
    let tables = if tie_word_embeddings { 1 } else { 2 } * (vocab_size * hidden_size) as u64;
    let (all, each) = (num_params as u64, config.training.param_dtype.dtype().size() as u64);
    if config.holds_codes() { all + (each - 1) * tables.min(all) } else { each * all }
}

/// Checks that the device can hold parameters of this size.
///
/// # Errors
/// A device that has less.
pub(super) fn check_parameters(bytes: u64, selected: &SelectedDevice) -> Result<()> {
    match available(selected) {
        Some(there) if bytes > there => bail!(
            "the model takes at least {}, and this machine has {}: take a smaller model, or share it among the ranks of several machines",
            size(bytes),
            size(there)
        ),
        _ => Ok(()),
    }
}

/// Bytes of the device, if known. CUDA's driver reports them; CPUs and software adapters have the
/// machine's memory.
pub(super) fn available(selected: &SelectedDevice) -> Option<u64> {
    match selected {
        SelectedDevice::Cpu | SelectedDevice::Wgpu(AdapterInfo { hardware: false, .. }) => Memory::of_machine(),
        _ => selected.memory(),
    }
}

/// Size in GiB, or in MiB if it is less than one GiB.
pub(super) fn size(bytes: u64) -> String {
    if bytes == u64::MAX {
        return "more than 2^64 bytes".into();
    }
    let (unit, name) = unit(bytes);
    format!("{:.2} {name}", bytes as f64 / unit)
}

/// Unit for printing a size: its bytes and its name.
pub(super) fn unit(bytes: u64) -> (f64, &'static str) {
    if bytes < 1 << 30 { (f64::from(1 << 20), "MiB") } else { (f64::from(1 << 30), "GiB") }
}
