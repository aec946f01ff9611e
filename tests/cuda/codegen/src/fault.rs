//! Injected faults of a device's kernels.

use std::sync::{Mutex, PoisonError};

use crate::state::OfflineDevice;

/// Fault of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Its launches do nothing, without an error.
    Drop,
    /// Its launches panic in the device's thread with this message.
    Panic(&'static str),
    /// It does not compile; the next read returns an error.
    Refuse,
    /// Replaces a text in its CUDA source.
    Edit(&'static str, &'static str),
    /// Changes the bytes that its launches read from the buffer at a position. Buffers of tensor maps
    /// come first. The memory keeps its values.
    Read(usize, Change),
}

/// Change of the bytes of a buffer.
pub type Change = fn(&mut [u8]);

static FAULTS: Mutex<Vec<(OfflineDevice, &'static str, Fault)>> = Mutex::new(vec![]);

/// Injects a fault into later launches of the device's kernels with this name prefix. The first
/// matching fault applies.
pub fn inject(device: &OfflineDevice, kernel: &'static str, fault: Fault) {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner).push((device.clone(), kernel, fault));
}

/// Fault of a kernel on this device.
pub(crate) fn of(device: &OfflineDevice, kernel: &str) -> Option<Fault> {
    let faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.iter().find(|(at, name, _)| at == device && kernel.starts_with(name)).map(|(.., fault)| *fault)
}
