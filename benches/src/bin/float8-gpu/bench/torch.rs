//! torch on the same shapes, measured by an embedded Python script.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Error;

const SCRIPT: &str = include_str!("../../../../torch_baseline.py");

/// Results of the script.
#[derive(Default, Serialize)]
pub struct Results {
    #[serde(flatten)]
    pub versions: Option<Versions>,
    gemm: Vec<Gemm>,
    grouped: Vec<Grouped>,
    linear: Vec<Linear>,
    beside: Vec<Attention>,
    /// GB/s of a copy on the device, reads and writes.
    pub copy_gb_per_s: Option<f64>,
}

/// Version of torch, and device.
#[derive(Serialize, Deserialize)]
pub struct Versions {
    pub version: String,
    pub device: String,
}

/// Line of the script's output.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Versions(Versions),
    Copy(f64),
    Gemm(Gemm),
    Grouped(Grouped),
    Linear(Linear),
    Beside(Attention),
}

/// TFLOP/s of one shape; None for modes that torch rejects.
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

/// TFLOP/s of one grouped GEMM; None for modes that torch rejects.
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

/// Forward and backward of causal attention; None where torch has no kernel for it.
#[derive(Serialize, Deserialize)]
pub struct Attention {
    /// B, heads, T and d.
    shape: Vec<usize>,
    pub flash_ms: Option<f64>,
    pub cudnn_ms: Option<f64>,
}

impl Results {
    /// Whether torch did not run.
    pub fn is_empty(&self) -> bool {
        self.versions.is_none()
    }

    /// Runs the script with `arguments`, which select parts and shapes, for at most `limit`.
    ///
    /// # Errors
    /// The script does not start, fails, prints invalid results, or is killed at its limit. Earlier
    /// results are kept.
    pub fn run(&mut self, python: &str, arguments: &[[String; 2]], limit: Duration) -> Result<(), Error> {
        println!("torch baseline ...");
        let io = |source| Error::Io { what: python.into(), source };
        let mut child = Command::new(python)
            .args(["-u", "-c", SCRIPT])
            .args(arguments.as_flattened())
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
            // It may have just exited.
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
            Line::Beside(row) => self.beside.push(row),
        }
    }

    /// Result of torch for M, N and K.
    pub fn gemm(&self, shape: [usize; 3]) -> Option<&Gemm> {
        self.gemm.iter().find(|torch| [torch.m, torch.n, torch.k] == shape)
    }

    /// TFLOP/s of torch's best FP8 mode for M, N and K.
    pub fn best(&self, shape: [usize; 3]) -> Option<f64> {
        let Gemm { precise, fast, rowwise, rowwise_fast, .. } = self.gemm(shape)?;
        [precise, fast, rowwise, rowwise_fast].into_iter().flatten().copied().reduce(f64::max)
    }

    /// Result of torch for groups of these sizes.
    pub fn grouped(&self, grouping: &str, sizes: &[usize], shape: [usize; 3]) -> Option<&Grouped> {
        self.grouped
            .iter()
            .find(|torch| torch.grouping == grouping && torch.sizes == sizes && [torch.m, torch.n, torch.k] == shape)
    }

    /// Torch's attention for B, heads, T and d.
    pub fn attention(&self, shape: &[usize]) -> Option<&Attention> {
        self.beside.iter().find(|torch| torch.shape == shape)
    }

    /// Milliseconds of torch's bf16 linear for M, K and N.
    pub fn linear_ms(&self, shape: [usize; 3]) -> Option<f64> {
        let found = self.linear.iter().find(|torch| [torch.m, torch.k, torch.n] == shape);
        found.map(|torch| torch.bf16_ms)
    }
}

impl Grouped {
    /// TFLOP/s of torch's best FP8 mode.
    pub fn best(&self) -> Option<f64> {
        [self.rowwise, self.rowwise_fast].into_iter().flatten().reduce(f64::max)
    }
}
