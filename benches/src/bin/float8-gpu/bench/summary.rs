//! Our rates against torch's, as means over the shapes of the performance targets.

use serde::Serialize;

use super::timing::{geometric_mean, or_dash};
use super::{gemm, grouped, linear, torch};

/// Smallest M, N and K of a shape in the mean.
const LARGE: usize = 2048;

/// Geometric means of our rates relative to torch's.
#[derive(Serialize)]
pub struct Summary {
    /// Our precise tensorwise GEMM / torch's best FP8 mode, for shapes with all dimensions of at
    /// least 2048.
    gemm_to_best: Option<f64>,
    /// Number of shapes in that mean.
    gemm_shapes: usize,
    /// Our tensorwise GEMM with fast accumulation / torch's best FP8 mode, for the same shapes.
    fast_to_best: Option<f64>,
    /// Our precise GEMM / torch's bf16 matmul.
    gemm_to_bf16: Option<f64>,
    /// Our precise rowwise grouped GEMM / torch's best FP8 mode.
    grouped_to_best: Option<f64>,
    /// Our precise rowwise grouped GEMM / torch's bf16 grouped GEMM.
    grouped_to_bf16: Option<f64>,
    /// Time of torch's bf16 linear / time of our tensorwise one.
    linear_to_bf16: Option<f64>,
}

impl Summary {
    pub fn new(torch: &torch::Results, gemms: &[gemm::Row], groups: &[grouped::Row], linears: &[linear::Row]) -> Self {
        let large = |row: &&gemm::Row| row.scales == "tensorwise" && row.m.min(row.n).min(row.k) >= LARGE;
        let mean = |ratio: &dyn Fn(&gemm::Row) -> Option<f64>| {
            let ratios: Vec<_> = gemms.iter().filter(large).filter_map(ratio).collect();
            (geometric_mean(&ratios), ratios.len())
        };
        let (gemm_to_best, gemm_shapes) = mean(&|row| Some(row.precise / torch.best(row.shape())?));
        let groups = groups.iter().filter(|row| row.scales == "rowwise");
        let of_groups = |rate: &dyn Fn(&grouped::Row) -> Option<f64>| {
            geometric_mean(&groups.clone().filter_map(|row| Some(row.precise / rate(row)?)).collect::<Vec<_>>())
        };
        let linears = linears.iter().filter(|row| row.precision == "tensorwise");
        let linears: Vec<_> =
            linears.filter_map(|row| Some(torch.linear_ms([row.m, row.k, row.n])? / row.milliseconds)).collect();
        Self {
            gemm_to_best,
            gemm_shapes,
            fast_to_best: mean(&|row| Some(row.fast / torch.best(row.shape())?)).0,
            gemm_to_bf16: mean(&|row| Some(row.precise / torch.gemm(row.shape())?.bf16?)).0,
            grouped_to_best: of_groups(&|row| row.torch(torch)?.best()),
            grouped_to_bf16: of_groups(&|row| row.torch(torch)?.bf16),
            linear_to_bf16: geometric_mean(&linears),
        }
    }

    pub fn print(&self) {
        let Self { gemm_to_best, gemm_shapes, fast_to_best, gemm_to_bf16, .. } = self;
        println!("\ngeometric means, {gemm_shapes} shapes with all dimensions of at least {LARGE}:");
        println!("precise FP8 GEMM to torch's best FP8 mode: {}", or_dash(*gemm_to_best, 3));
        println!("fast FP8 GEMM to torch's best FP8 mode: {}", or_dash(*fast_to_best, 3));
        println!("precise FP8 GEMM to torch bf16: {}", or_dash(*gemm_to_bf16, 3));
        println!("rowwise grouped GEMM to torch's best FP8 mode: {}", or_dash(self.grouped_to_best, 3));
        println!("rowwise grouped GEMM to torch bf16: {}", or_dash(self.grouped_to_bf16, 3));
        println!("tensorwise linear, forward + backward, to torch bf16: {}", or_dash(self.linear_to_bf16, 3));
    }
}
