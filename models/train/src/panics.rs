//! Libraries that panic where a file contradicts itself: their panics as errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `call` returns, or the text of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        text.unwrap_or_else(|| "it contradicts itself".into())
    })
}
