//! What memory a device has, and the refusal of what exceeds it.

use burn::tensor::DType;
use device_select::{AdapterInfo, SelectedDevice};

use crate::JobError;
use crate::metrics::Memory;
use crate::model::{ModelConfig, ModelSize};

/// Refuses a model whose parameters, in this dtype or as codes, the device has no room for.
///
/// # Errors
/// [`JobError::Memory`].
pub(super) fn check_parameters<C: ModelConfig>(
    dims: &C,
    dtype: DType,
    holds_codes: bool,
    selected: &SelectedDevice,
) -> Result<(), JobError> {
    let ModelSize { num_params, vocab_size, hidden_size, .. } = dims.size();
    let (all, tables, each) = (num_params as u64, 2 * (vocab_size * hidden_size) as u64, dtype.size() as u64);
    let bytes = if holds_codes { all + (each - 1) * tables.min(all) } else { each * all };
    check(bytes, "the model", selected)
}

/// Refuses what takes more bytes than the device has.
///
/// # Errors
/// [`JobError::Memory`].
pub(super) fn check(needed: u64, what: &'static str, selected: &SelectedDevice) -> Result<(), JobError> {
    match there(selected) {
        Some(there) if needed > there => Err(JobError::Memory { what, needed: size(needed), there: size(there) }),
        _ => Ok(()),
    }
}

/// Bytes that the device has, if that is known: CUDA's driver tells, and what a CPU computes, as a software adapter, is in the machine's
/// memory.
pub(super) fn there(selected: &SelectedDevice) -> Option<u64> {
    match selected {
        SelectedDevice::Cpu | SelectedDevice::Wgpu(AdapterInfo { hardware: false, .. }) => Memory::of_machine(),
        _ => selected.memory(),
    }
}

/// Bytes in GiB, or in MiB where they are less than one.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        u64::MAX => "more than 2^64 bytes".into(),
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
