//! [`Peak`]: peak throughput of a device, the reference of MFU.

/// Peak model FLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Peak {
    /// FLOP/s given by the user.
    Given(f64),
    /// FLOP/s of a known device's matrix units.
    Known {
        /// In FP8 with f32 accumulation, if supported.
        fp8: Option<f64>,
        /// In bf16.
        bf16: f64,
    },
}

/// A known device: the driver's name for it, dense TFLOP/s in FP8 and in bf16, both with f32
/// accumulation, and the NVIDIA document with the figures. Figures with sparsity are halved. The
/// RTX 5090 has no FP8 figure: its document gives the plain instruction, and GEMMs here use the
/// faster block-scaled one.
type Device = (&'static str, Option<f64>, f64, &'static str);

/// Names are compared exactly: laptop GPUs, MIG slices and other memory sizes have separate names
/// and peaks.
const DEVICES: [Device; 24] = [
    ("NVIDIA H100 80GB HBM3", Some(1979.0), 989.5, "H100 Tensor Core GPU datasheet, H100 SXM"),
    ("NVIDIA H100 PCIe", Some(1513.0), 756.0, "H100 Tensor Core GPU architecture whitepaper, H100 PCIe"),
    ("NVIDIA H100 NVL", Some(1670.5), 835.5, "H100 Tensor Core GPU datasheet, H100 NVL"),
    ("NVIDIA H200", Some(1979.0), 989.5, "H200 Tensor Core GPU datasheet, H200 SXM"),
    ("NVIDIA H200 NVL", Some(1670.5), 835.5, "H200 Tensor Core GPU datasheet, H200 NVL"),
    ("NVIDIA GH200 120GB", Some(1979.0), 989.5, "GH200 Grace Hopper Superchip datasheet"),
    ("NVIDIA GH200 480GB", Some(1979.0), 989.5, "GH200 Grace Hopper Superchip datasheet"),
    ("NVIDIA GH200 144G HBM3e", Some(1979.0), 989.5, "GH200 Grace Hopper Superchip datasheet"),
    ("NVIDIA B200", Some(4500.0), 2250.0, "Blackwell architecture datasheet, HGX B200"),
    ("NVIDIA GB200", Some(5000.0), 2500.0, "GB200 NVL72 datasheet, a GPU"),
    ("NVIDIA B300 SXM6 AC", Some(4500.0), 2250.0, "HGX B300 datasheet"),
    ("NVIDIA GB300", Some(5000.0), 2500.0, "GB300 NVL72 datasheet, a GPU"),
    ("NVIDIA L4", Some(242.5), 121.0, "L4 Tensor Core GPU datasheet"),
    ("NVIDIA L40", Some(362.0), 181.05, "L40 GPU datasheet"),
    ("NVIDIA L40S", Some(733.0), 362.05, "L40S GPU datasheet"),
    ("NVIDIA RTX 6000 Ada Generation", Some(728.5), 364.25, "RTX 6000 Ada Generation datasheet"),
    ("NVIDIA GeForce RTX 4090", Some(330.3), 165.2, "Ada GPU architecture whitepaper"),
    ("NVIDIA GeForce RTX 5090", None, 209.5, "RTX Blackwell GPU architecture whitepaper"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        Some(1007.6),
        503.8,
        "RTX PRO Blackwell GPU architecture whitepaper",
    ),
    (
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        Some(877.9),
        438.9,
        "RTX PRO Blackwell GPU architecture whitepaper",
    ),
    ("NVIDIA A100-SXM4-40GB", None, 312.0, "A100 Tensor Core GPU datasheet"),
    ("NVIDIA A100-SXM4-80GB", None, 312.0, "A100 Tensor Core GPU datasheet"),
    ("NVIDIA A100-PCIE-40GB", None, 312.0, "A100 Tensor Core GPU datasheet"),
    ("NVIDIA A100 80GB PCIe", None, 312.0, "A100 Tensor Core GPU datasheet"),
];

impl Peak {
    /// Total peak of `count` devices of this name, if known.
    pub fn of_devices(name: &str, count: usize) -> Option<Self> {
        let (_, fp8, bf16, _) = DEVICES.iter().find(|(known, ..)| *known == name)?;
        let all = |tflops: f64| tflops * 1e12 * count as f64;
        Some(Self::Known { fp8: fp8.map(all), bf16: all(*bf16) })
    }

    /// The known devices as a Markdown table.
    pub fn table() -> String {
        let tflops = |tflops: f64| if tflops.fract() == 0.0 { format!("{tflops:.0}") } else { format!("{tflops}") };
        let rows = DEVICES.iter().map(|(name, fp8, bf16, source)| {
            format!("| {name} | {} | {} | {source} |\n", fp8.map_or_else(String::new, tflops), tflops(*bf16))
        });
        let head = "| device | FP8 | bf16 | NVIDIA's |\n| --- | ---: | ---: | --- |\n";
        std::iter::once(head.to_string()).chain(rows).collect()
    }
}
