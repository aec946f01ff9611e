//! torch on the same shapes, by a Python script that is part of the program.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::timing::{geometric_mean, or_dash};
use super::{Size, gemm, grouped, linear};
use crate::Error;

const SCRIPT: &str = include_str!("../../../../torch_baseline.py");

/// Tokens, K and N from which on a shape counts for the mean.
const LARGE: usize = 2048;

/// What the script has printed.
#[derive(Default, Serialize)]
pub struct Results {
    #[serde(flatten)]
    pub versions: Option<Versions>,
    gemm: Vec<Gemm>,
    grouped: Vec<Grouped>,
    linear: Vec<Linear>,
    /// GB/s of a copy on the device, reads and writes.
    pub copy_gb_per_s: Option<f64>,
}

/// What ran.
#[derive(Serialize, Deserialize)]
pub struct Versions {
    pub version: String,
    pub device: String,
}

/// A line of the script's output.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Versions(Versions),
    Copy(f64),
    Gemm(Gemm),
    Grouped(Grouped),
    Linear(Linear),
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

impl Results {
    /// Whether torch did not run.
    pub fn is_empty(&self) -> bool {
        self.versions.is_none()
    }

    /// Runs the script on the shapes of `parts` and takes what it measures within `limit`.
    ///
    /// # Errors
    /// It does not start, fails, or prints what is no result; it is killed at its limit. What it has measured until then is kept.
    pub fn run(&mut self, python: &str, parts: &[String], size: Size, limit: Duration) -> Result<(), Error> {
        let list = |shapes: Vec<[usize; 3]>| {
            shapes.iter().map(|[a, b, c]| format!("{a}x{b}x{c}")).collect::<Vec<_>>().join(",")
        };
        let groups: Vec<_> = grouped::shapes(size).into_iter().map(grouped::Shape::argument).collect();
        println!("torch baseline ...");
        let io = |source| Error::Io { what: python.into(), source };
        let mut child = Command::new(python)
            .args(["-u", "-c", SCRIPT, "--only", &parts.join(",")])
            .args(["--gemm", &list(gemm::shapes(size)), "--linear", &list(linear::shapes(size))])
            .args(["--grouped", &groups.join(",")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io)?;
        let (sender, lines) = channel();
        let output = child.stdout.take().expect("piped");
        std::thread::spawn(move || BufReader::new(output).lines().try_for_each(|line| sender.send(line)));
        let end = Instant::now() + limit;
        let mut result = Ok(());
        while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            match serde_json::from_str(&line.map_err(io)?) {
                Ok(line) => self.add(line),
                Err(source) => result = Err(Error::Json { what: "torch baseline", source }),
            }
        }
        if Instant::now() >= end {
            // It may end just now.
            let _ = child.kill();
            return Err(Error::Torch(format!("killed after {} s", limit.as_secs())));
        }
        let status = child.wait().map_err(io)?;
        if status.success() { result } else { Err(Error::Torch(status.to_string())) }
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Versions(versions) => self.versions = Some(versions),
            Line::Copy(rate) => self.copy_gb_per_s = Some(rate),
            Line::Gemm(row) => self.gemm.push(row),
            Line::Grouped(row) => self.grouped.push(row),
            Line::Linear(row) => self.linear.push(row),
        }
    }

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
