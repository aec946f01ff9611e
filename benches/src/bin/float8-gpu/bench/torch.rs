//! torch on the same shapes, by a Python script that is part of the program.

use std::process::Command;

use serde::{Deserialize, Serialize};

use super::timing::{geometric_mean, or_dash};
use super::{gemm, grouped, linear};
use crate::Error;

const SCRIPT: &str = include_str!("../../../../torch_baseline.py");

/// Tokens, K and N from which on a shape counts for the mean.
const LARGE: usize = 2048;

/// What the script prints.
#[derive(Serialize, Deserialize)]
pub struct Results {
    pub version: String,
    pub device: String,
    #[serde(default)]
    gemm: Vec<Gemm>,
    #[serde(default)]
    grouped: Vec<Grouped>,
    #[serde(default)]
    linear: Vec<Linear>,
    /// GB/s of a copy on the device, reads and writes.
    pub copy_gb_per_s: Option<f64>,
}

/// TFLOP/s of one shape; none where torch refuses it.
#[derive(Serialize, Deserialize)]
pub struct Gemm {
    m: usize,
    n: usize,
    k: usize,
    precise: Option<f64>,
    fast: Option<f64>,
    rowwise: Option<f64>,
    rowwise_fast: Option<f64>,
    pub bf16: Option<f64>,
}

/// TFLOP/s of one grouped GEMM; none where torch refuses it.
#[derive(Serialize, Deserialize)]
pub struct Grouped {
    grouping: String,
    sizes: Vec<usize>,
    m: usize,
    n: usize,
    k: usize,
    rowwise: Option<f64>,
    rowwise_fast: Option<f64>,
    pub bf16: Option<f64>,
}

/// Forward and backward of a linear.
#[derive(Serialize, Deserialize)]
struct Linear {
    m: usize,
    k: usize,
    n: usize,
    bf16_ms: f64,
}

/// Geometric means of our times against torch's.
#[derive(Serialize)]
pub struct Summary {
    /// Our precise tensorwise GEMM / torch's best FP8 mode, shapes with all dimensions of at least 2048.
    gemm_to_best: Option<f64>,
    /// Shapes in that mean.
    gemm_shapes: usize,
    /// The same with our fast accumulation.
    fast_to_best: Option<f64>,
    /// Our precise GEMM / torch's bf16 matmul.
    gemm_to_bf16: Option<f64>,
    /// Our precise rowwise grouped GEMM / torch's best FP8 mode.
    grouped_to_best: Option<f64>,
    /// The same / torch's bf16 grouped GEMM.
    grouped_to_bf16: Option<f64>,
    /// torch's bf16 linear / our tensorwise one.
    linear_to_bf16: Option<f64>,
}

/// Runs the script on the shapes of `parts`.
pub fn run(python: &str, parts: &[String], quick: bool, limit_seconds: u64) -> Result<Results, Error> {
    let list =
        |shapes: Vec<[usize; 3]>| shapes.iter().map(|[a, b, c]| format!("{a}x{b}x{c}")).collect::<Vec<_>>().join(",");
    let groups: Vec<_> = grouped::shapes(quick).into_iter().map(grouped::Shape::argument).collect();
    println!("torch baseline ...");
    let output = Command::new(python)
        .args(["-c", SCRIPT, "--only", &parts.join(","), "--limit-seconds", &limit_seconds.to_string()])
        .args(["--gemm", &list(gemm::shapes(quick)), "--linear", &list(linear::shapes(quick))])
        .args(["--grouped", &groups.join(",")])
        .output()
        .map_err(|source| Error::Io { what: python.into(), source })?;
    let error = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(Error::Torch(error.lines().last().unwrap_or("no message").into()));
    }
    // What torch refuses.
    error.lines().for_each(|line| println!("torch: {line}"));
    serde_json::from_slice(&output.stdout).map_err(|source| Error::Json { what: "torch baseline", source })
}

impl Results {
    /// torch on the shape of this row.
    pub fn gemm(&self, row: &gemm::Row) -> Option<&Gemm> {
        self.gemm.iter().find(|torch| [torch.m, torch.n, torch.k] == [row.m, row.n, row.k])
    }

    /// TFLOP/s of torch's best FP8 mode on the shape of this row.
    pub fn best(&self, row: &gemm::Row) -> Option<f64> {
        let Gemm { precise, fast, rowwise, rowwise_fast, .. } = self.gemm(row)?;
        [precise, fast, rowwise, rowwise_fast].into_iter().flatten().copied().reduce(f64::max)
    }

    /// torch on the groups of this row.
    pub fn grouped(&self, row: &grouped::Row) -> Option<&Grouped> {
        let shape = [row.m, row.n, row.k];
        self.grouped.iter().find(|torch| {
            torch.grouping == row.grouping && torch.sizes == row.sizes && [torch.m, torch.n, torch.k] == shape
        })
    }

    /// TFLOP/s of torch's best FP8 mode on them.
    pub fn best_grouped(&self, row: &grouped::Row) -> Option<f64> {
        let Grouped { rowwise, rowwise_fast, .. } = self.grouped(row)?;
        [rowwise, rowwise_fast].into_iter().flatten().copied().reduce(f64::max)
    }

    /// Milliseconds of torch's bf16 linear on the shape of this row.
    pub fn linear_ms(&self, row: &linear::Row) -> Option<f64> {
        let found = self.linear.iter().find(|torch| [torch.m, torch.k, torch.n] == [row.m, row.k, row.n]);
        found.map(|torch| torch.bf16_ms)
    }

    pub(super) fn summary(&self, gemms: &[gemm::Row], groups: &[grouped::Row], linears: &[linear::Row]) -> Summary {
        let large = |row: &&gemm::Row| row.scales == "tensorwise" && row.m.min(row.n).min(row.k) >= LARGE;
        let mean = |ratio: &dyn Fn(&gemm::Row) -> Option<f64>| {
            let ratios: Vec<_> = gemms.iter().filter(large).filter_map(ratio).collect();
            (geometric_mean(&ratios), ratios.len())
        };
        let (gemm_to_best, gemm_shapes) = mean(&|row| Some(row.precise / self.best(row)?));
        let groups = groups.iter().filter(|row| row.scales == "rowwise");
        let of_groups = |torch: &dyn Fn(&grouped::Row) -> Option<f64>| {
            geometric_mean(&groups.clone().filter_map(|row| Some(row.precise / torch(row)?)).collect::<Vec<_>>())
        };
        let linears = linears.iter().filter(|row| row.precision == "tensorwise");
        let linears: Vec<_> = linears.filter_map(|row| Some(self.linear_ms(row)? / row.milliseconds)).collect();
        Summary {
            gemm_to_best,
            gemm_shapes,
            fast_to_best: mean(&|row| Some(row.fast / self.best(row)?)).0,
            gemm_to_bf16: mean(&|row| Some(row.precise / self.gemm(row)?.bf16?)).0,
            grouped_to_best: of_groups(&|row| self.best_grouped(row)),
            grouped_to_bf16: of_groups(&|row| self.grouped(row)?.bf16),
            linear_to_bf16: geometric_mean(&linears),
        }
    }
}

impl Summary {
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
