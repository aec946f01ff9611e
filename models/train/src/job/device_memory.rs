//! Memory of a device, and the check against it.

use anyhow::bail;
use burn::tensor::DType;
use device_select::{AdapterInfo, SelectedDevice};

use crate::JobError;
use crate::metrics::Memory;
use crate::model::{ModelConfig, ModelSize};

/// Checks that the parameters, in this dtype or as FP8 codes, fit in the device's memory.
///
/// # Errors
/// [`JobError::Memory`].
pub(super) fn check_parameters<C: ModelConfig>(
    dims: &C,
    dtype: DType,
    holds_codes: bool,
    selected: &SelectedDevice,
) -> Result<(), JobError> {
    let ModelSize { num_params, vocab_size, hidden_size, tie_word_embeddings, .. } = dims.size();
    let tables = if tie_word_embeddings { 1 } else { 2 } * (vocab_size * hidden_size) as u64;
    let (all, each) = (num_params as u64, dtype.size() as u64);
    let bytes = if holds_codes { all + (each - 1) * tables.min(all) } else { each * all };
    check(bytes, "the model", selected)
}

/// Checks a number of bytes against the device's memory.
///
/// # Errors
/// [`JobError::Memory`].
pub(super) fn check(needed: u64, what: &'static str, selected: &SelectedDevice) -> Result<(), JobError> {
    match there(selected) {
        Some(there) if needed > there => bail!(
            "{what} takes at least {}, and this machine has {}: take a smaller model, or share it among the ranks of several machines",
            size(needed),
            size(there)
        ),
        _ => Ok(()),
    }
}

/// Bytes of the device, if known. CUDA's driver reports them; CPUs and software adapters have the
/// machine's memory.
pub(super) fn there(selected: &SelectedDevice) -> Option<u64> {
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
