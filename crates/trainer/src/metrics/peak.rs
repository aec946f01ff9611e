//! [`Peak`]: peak throughput of a device, the reference of MFU.

/// Peak FLOP/s of a known device's matrix units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// In FP8 with f32 accumulation, if supported.
    pub fp8: Option<f64>,
    /// In bf16.
    pub bf16: f64,
}

impl Peak {
    /// The known devices as a Markdown table: the driver's name, dense TFLOP/s in FP8 and in bf16,
    /// both with f32 accumulation, and the NVIDIA document with the figures. Figures with sparsity
    /// are halved. The RTX 5090 has no FP8 figure: its document gives the plain instruction, and
    /// GEMMs here use the faster block-scaled one.
    pub const TABLE: &str = include_str!("peaks.md");

    /// Total peak of `count` devices of this name, if known. Names are compared exactly: laptop
    /// GPUs, MIG slices and other memory sizes have separate names and peaks.
    pub fn of_devices(name: &str, count: usize) -> Option<Self> {
        let rows = Self::TABLE.lines().skip(2).map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
        let row = rows.into_iter().find(|row| row[1] == name)?;
        let all = |tflops: &str| tflops.parse::<f64>().ok().map(|tflops| tflops * 1e12 * count as f64);
        Some(Self { fp8: all(row[2]), bf16: all(row[3])? })
    }
}
