//! Libraries that panic where a file contradicts itself: their panics as errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Whether the thread is inside of [`caught`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns, or the text of its panic.
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

/// Has the process print no panic that becomes an error. It is for programs: the hook that prints panics is the whole process's.
pub fn hide_caught_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !IS_CAUGHT.get() {
            print(info);
        }
    }));
}
