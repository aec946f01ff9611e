//! Tasks that CubeCL's device threads have lost. A launch is a task there; if it panics, for want of memory, headers or a library, CubeCL
//! logs a warning and goes on, and what reads its output later sees whatever the memory held.
//!
//! A panic hook, before the one that is there, notes panics of these threads, which have names that no other thread has. It costs
//! nothing until then.
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::DeviceId;
use parking_lot::Mutex;

/// The thread's name and the message of each.
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
            if let Some(name) = thread.name().filter(|name| is_device_thread(name)) {
                let message = panic.payload_as_str().unwrap_or("a panic without a message");
                let place = panic.location().map_or(String::new(), |place| format!(" ({place})"));
                LOST.lock().push((name.into(), format!("{}{place}", message.trim())));
                COUNT.fetch_add(1, Ordering::AcqRel);
            }
            before(panic);
        }));
    });
}

/// Whether it is one of CubeCL's, `DS`, the stage, then type and index of the device.
fn is_device_thread(name: &str) -> bool {
    name.starts_with("DSD-") || name.starts_with("DSU-")
}

fn is_of(name: &str, device: DeviceId) -> bool {
    name.get(4..) == Some(&*format!("{}-{}", device.type_id, device.index_id))
}

/// Whether no device has lost anything.
pub(super) fn is_nothing() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// The first message of what the device has lost.
pub(super) fn first(device: DeviceId) -> Option<String> {
    if is_nothing() {
        return None;
    }
    LOST.lock().iter().find(|(name, _)| is_of(name, device)).map(|(_, message)| message.clone())
}

/// What the device has lost, which whoever asks makes up for.
pub(super) fn take(device: DeviceId) -> Vec<String> {
    if is_nothing() {
        return vec![];
    }
    let mut lost = LOST.lock();
    let (of_device, others): (Vec<_>, Vec<_>) = lost.drain(..).partition(|(name, _)| is_of(name, device));
    COUNT.store(others.len(), Ordering::Release);
    *lost = others;
    of_device.into_iter().map(|(_, message)| message).collect()
}
