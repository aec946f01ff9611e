//! Device errors. CubeCL launches kernels on a thread of the device. If a launch panics there, for
//! lack of memory, headers or a library, CubeCL logs a warning and continues. Reads of its output
//! then return arbitrary bytes.
//!
//! A panic hook, run before the existing one, records panics of these threads, which it identifies
//! by name. Launch errors returned by a later call are recorded here too.
use core::fmt::Display;
use std::backtrace::Backtrace;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::DeviceId;
use parking_lot::Mutex;

/// Device and message of each error.
static LOST: Mutex<Vec<(String, String)>> = Mutex::new(vec![]);

/// Number of errors. While it is 0, the lock is not taken.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Installs the hook that records panics of device threads.
pub(super) fn watch() {
    static WATCHING: Once = Once::new();
    // A panicking thread cannot set a hook.
    if std::thread::panicking() {
        return;
    }
    WATCHING.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            // CubeCL's thread name: the stage, then type and index of the device.
            let device = thread.name().and_then(|name| name.strip_prefix("DSD-").or(name.strip_prefix("DSU-")));
            // A kernel may panic during autotuning, which then selects another one.
            let is_trial = || Backtrace::force_capture().to_string().contains("tune_benchmark");
            if let Some(device) = device.filter(|_| !is_trial()) {
                let message = panic.payload_as_str().unwrap_or("a panic without a message");
                let place = panic.location().map_or(String::new(), |place| format!(" ({place})"));
                push(device.into(), format!("a task of its thread has panicked: {}{place}", message.trim()));
            }
            before(panic);
        }));
    });
}

/// The first error of any device since the first call, for programs that launch kernels themselves.
pub fn device_error() -> Option<String> {
    watch();
    LOST.lock().first().map(|(device, message)| format!("{device}: {message}"))
}

fn name(device: DeviceId) -> String {
    format!("{}-{}", device.type_id, device.index_id)
}

fn push(device: String, message: String) {
    let mut lost = LOST.lock();
    lost.push((device, message));
    COUNT.store(lost.len(), Ordering::Release);
}

/// Records an error of an earlier launch that the device returned.
pub(super) fn push_reported(device: DeviceId, error: impl Display) {
    push(name(device), format!("it reported: {error}"));
}

/// Whether no device has an error.
pub(super) fn is_nothing() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// The first error of the device.
pub(super) fn first(device: DeviceId) -> Option<String> {
    if is_nothing() {
        return None;
    }
    let name = name(device);
    LOST.lock().iter().find(|(of, _)| *of == name).map(|(_, message)| message.clone())
}

/// Number of the device's errors.
pub(super) fn count(device: DeviceId) -> usize {
    if is_nothing() {
        return 0;
    }
    let name = name(device);
    LOST.lock().iter().filter(|(of, _)| *of == name).count()
}

/// Takes the device's errors after the first `known`.
pub(super) fn take_after(device: DeviceId, known: usize) -> Vec<String> {
    if is_nothing() {
        return vec![];
    }
    let (name, mut seen, mut taken) = (name(device), 0, vec![]);
    let mut lost = LOST.lock();
    lost.retain(|(of, message)| {
        seen += usize::from(*of == name);
        let is_taken = *of == name && seen > known;
        if is_taken {
            taken.push(message.clone());
        }
        !is_taken
    });
    COUNT.store(lost.len(), Ordering::Release);
    taken
}
