//! Shared test utilities: a random generator, floats at which casts and scales can be wrong, a
//! reader of reference vectors and an error measure. Also transposes, comparisons of floats, the
//! text of a panic, and a list of skipped tests.
//!
//! It does not depend on the crates under test, so each of them can use it in its tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

mod allocator;
mod floats;
mod golden;
mod random;
mod skip;

pub use allocator::Counting;
pub use floats::{amaxes, binade_edges, encoder_edges};
pub use golden::Golden;
pub use random::{Random, normal};
pub use skip::{CUDA_TOOLS, VULKAN, skip, skip_optional, take_skipped};

/// ‖a − b‖ / ‖b‖ in f64; NaN if the lengths differ.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut b.iter().map(|b| f64::from(*b)))
}

/// Whether both have the same bits or are NaN.
pub fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Message with which `run` panics.
///
/// # Panics
/// If `run` does not panic, or panics without a message.
pub fn panic_of(run: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("it was to panic");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).expect("a message")
}

/// Transposes row-major `[rows, cols]` to row-major `[cols, rows]`.
pub fn transpose<T: Copy>(x: &[T], [rows, cols]: [usize; 2]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}
