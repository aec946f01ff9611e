//! What devices have lost. CubeCL launches kernels in a thread of the device; if a launch panics there, for want of memory, headers or a
//! library, CubeCL logs a warning and goes on, and what reads its output later sees whatever the memory held.
//!
//! A panic hook, before the one that is there, notes panics of these threads, which have names that no other thread has. It costs
//! nothing until then. An error of a launch that comes to light in a later call is noted here too.
use core::fmt::Display;
use std::backtrace::Backtrace;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::DeviceId;
use parking_lot::Mutex;

/// Device and message of each.
static LOST: Mutex<Vec<(String, String)>> = Mutex::new(vec![]);

/// Their number, so that nobody takes the lock while there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Notes panics of device threads from here on.
pub(super) fn watch() {
    static WATCHING: Once = Once::new();
    // Whoever is unwinding cannot set a hook.
    if std::thread::panicking() {
        return;
    }
    WATCHING.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            // CubeCL's: the stage, then type and index of the device.
            let device = thread.name().and_then(|name| name.strip_prefix("DSD-").or(name.strip_prefix("DSU-")));
            // A kernel that is tried out by autotuning may panic: another one is taken.
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

fn name(device: DeviceId) -> String {
    format!("{}-{}", device.type_id, device.index_id)
}

fn push(device: String, message: String) {
    let mut lost = LOST.lock();
    lost.push((device, message));
    COUNT.store(lost.len(), Ordering::Release);
}

/// Notes an error of the device, which belongs to a launch that nobody waits for.
pub(super) fn reported(device: DeviceId, error: impl Display) {
    push(name(device), format!("it reported: {error}"));
}

/// Whether no device has lost anything.
pub(super) fn is_nothing() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// The first that the device has lost.
pub(super) fn first(device: DeviceId) -> Option<String> {
    if is_nothing() {
        return None;
    }
    let name = name(device);
    LOST.lock().iter().find(|(of, _)| *of == name).map(|(_, message)| message.clone())
}

/// How much the device has lost.
pub(super) fn count(device: DeviceId) -> usize {
    if is_nothing() {
        return 0;
    }
    let name = name(device);
    LOST.lock().iter().filter(|(of, _)| *of == name).count()
}

/// What the device has lost beyond its first `known`, which whoever asks makes up for.
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
