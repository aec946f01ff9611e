//! Converts panics of libraries that read inconsistent files to errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Whether the thread is inside of [`caught`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Result of `call`, or the message of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    let outer = IS_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    IS_CAUGHT.set(outer);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        text.unwrap_or_else(|| "it contradicts itself".into())
    })
}

/// Suppresses the output of panics that become errors. For programs only: the panic hook belongs to
/// the whole process.
pub fn hide_caught_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !IS_CAUGHT.get() {
            print(info);
        }
    }));
}
