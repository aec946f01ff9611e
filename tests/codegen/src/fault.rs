//! Faults of a device: what goes wrong with some of its kernels.

use std::sync::{Mutex, PoisonError};

use crate::state::OfflineDevice;

/// What goes wrong with a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Its launches do nothing, and nobody is told.
    Drop,
    /// Its launches panic in the device's thread with this message.
    Panic(&'static str),
    /// It does not compile: an error of the next read.
    Refuse,
    /// Its CUDA has another text in the place of one.
    Edit(&'static str, &'static str),
}

static FAULTS: Mutex<Vec<(OfflineDevice, &'static str, Fault)>> = Mutex::new(vec![]);

/// From here on this is wrong with kernels of the device whose names begin so; of several, the first counts.
pub fn inject(device: &OfflineDevice, kernel: &'static str, fault: Fault) {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner).push((device.clone(), kernel, fault));
}

/// What is wrong with a kernel of this device.
pub(crate) fn of(device: &OfflineDevice, kernel: &str) -> Option<Fault> {
    let faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.iter().find(|(at, name, _)| at == device && kernel.starts_with(name)).map(|(.., fault)| *fault)
}
