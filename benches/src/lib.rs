//! Parts that `float8-gpu` and `cargo bench` share.
pub mod linear;
pub mod ops;
pub mod table;

/// Median.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
