//! Launches of every kernel variant of the library, to generate their CUDA: each dtype, layout,
//! format, scale, orientation and size class that selects different code.

mod attention;
mod fused;
mod halves;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_core::server::Handle;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::{
    Cast, Format, GEMV_ROWS, GemmConfig, GemmPath, Granularity, Grouping, Groups, MatrixView, Operand, Orientation,
    ScaleCalculationMode, ScaleMode, VectorView, amax, dequantize_mx, dequantize_to_f32, gemm_path,
    grouped_scaled_gemm, health, quantize, quantize_with_amax, row_words, scaled_gemm, supports, transpose,
};

use crate::device::{GenerateCuda, Generated, OfflineDevice, take};

const MODES: [ScaleMode; 2] = [ScaleMode::F32, ScaleMode::PowerOfTwo];
const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];
/// Granularities with f32 scales; [`MX`] has different modes.
const GRANULARITIES: [Granularity; 4] =
    [Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128];
const MX: Granularity = Granularity::Block1x32;

/// Contraction lengths for every `RowSplit` of the rowwise cast. They cover each number of units
/// per row and of words per unit, and a row that is too long to keep.
const ROW_LENGTHS: [usize; 14] = [16, 48, 128, 144, 256, 272, 512, 1024, 2048, 4096, 8192, 12288, 16384, 32768];

fn dtypes() -> [StorageType; 3] {
    [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(|kind| StorageType::Scalar(ElemType::Float(kind)))
}

/// Whether `FLOAT8_VARIANTS=all` requests all variants instead of a sample.
///
/// # Panics
/// If the variable has another value.
pub fn all_are_asked_for() -> bool {
    match std::env::var("FLOAT8_VARIANTS").as_deref() {
        Ok("all") => true,
        Ok(other) => panic!("FLOAT8_VARIANTS is {other:?}: expected all, or nothing"),
        Err(_) => false,
    }
}

/// Selects half of the calls: half 0, or half 1 with the others. Of nested loops over two cases each,
/// every half has every pair of cases (the Thue-Morse sequence). `FLOAT8_VARIANTS=all` selects all.
pub fn sample(half: u32) -> impl Fn() -> bool {
    let (all, calls) = (all_are_asked_for(), Cell::new(0_u32));
    move || {
        let call = calls.replace(calls.get() + 1);
        all || call.count_ones() % 2 == half
    }
}

/// CUDA of every variant for compute capability `sm`, without duplicate sources. A process generates it
/// once.
///
/// # Panics
/// If a kernel cannot be generated.
pub fn generate(sm: u16) -> Arc<[Generated]> {
    static ALL: Mutex<BTreeMap<u16, Arc<[Generated]>>> = Mutex::new(BTreeMap::new());
    let mut all = ALL.lock().expect("every kernel has been generated");
    all.entry(sm).or_insert_with(|| launch_all(sm)).clone()
}

fn launch_all(sm: u16) -> Arc<[Generated]> {
    let launcher = Launcher { client: GenerateCuda::client(&OfflineDevice::new(sm)) };
    launcher.quantize();
    launcher.rows();
    launcher.fused();
    launcher.adamw();
    launcher.attention();
    launcher.gemms();
    launcher.halves();
    launcher.grouped();
    // Kernels are generated on the device's thread.
    cubecl_common::future::block_on(launcher.client.sync()).expect("a device that fails nothing");
    let distinct: BTreeMap<_, _> = take().into_iter().map(|kernel| (kernel.key(), kernel)).collect();
    distinct.into_values().collect()
}

struct Launcher {
    client: ComputeClient<GenerateCuda>,
}

impl Launcher {
    fn memory(&self, bytes: usize) -> Handle {
        self.client.empty(bytes)
    }

    /// `[rows, cols]` whose rows are `pitch` elements apart.
    fn matrix(&self, [rows, cols]: [usize; 2], pitch: usize, dtype: StorageType) -> MatrixView {
        let handle = self.memory(rows * pitch * dtype.size());
        MatrixView { handle, shape: [rows, cols], strides: [pitch, 1], dtype }
    }

    /// Casts and health of every dtype, with vector loads and, for ragged rows, scalar loads.
    fn quantize(&self) {
        for dtype in dtypes() {
            for cols in [256, 255] {
                let x = self.matrix([130, cols], cols, dtype);
                amax(&self.client, &x).expect("a valid view");
                for format in Format::ALL {
                    for granularity in GRANULARITIES {
                        for scale_mode in MODES {
                            self.casts(&x, Cast { format, granularity, scale_mode });
                        }
                    }
                    for mode in ScaleCalculationMode::ALL {
                        for scale_mode in [ScaleMode::E8m0(mode), ScaleMode::E8m0Square(mode)] {
                            self.casts(&x, Cast { format, granularity: MX, scale_mode });
                        }
                    }
                }
            }
        }
    }

    fn casts(&self, x: &MatrixView, cast: Cast) {
        for orientation in ORIENTATIONS {
            let made = quantize(&self.client, x, cast, orientation).expect("a valid view");
            if let Some(rows) = &made.rows {
                health(&self.client, x, rows).expect("cast from this view");
            }
            if cast.granularity == Granularity::Tensor {
                for observe in [false, true] {
                    let amax = self.memory(4);
                    quantize_with_amax(&self.client, x, &amax, observe, cast, orientation).expect("a valid view");
                }
            }
        }
    }

    fn rows(&self) {
        for dtype in dtypes() {
            for cols in ROW_LENGTHS {
                let x = self.matrix([64, cols], cols, dtype);
                let cast =
                    Cast { format: Format::E4m3, granularity: Granularity::Row, scale_mode: ScaleMode::PowerOfTwo };
                quantize(&self.client, &x, cast, Orientation::Rows).expect("a valid view");
            }
        }
    }

    fn operand(&self, [rows, k]: [usize; 2], format: Format, granularity: Granularity) -> Operand {
        let codes = self.memory(rows * row_words(k) * 4);
        let inv_scale = self.memory(granularity.scale_words(rows, k) * 4);
        Operand { codes, inv_scale, rows, k, format, granularity, power_of_two: granularity == MX }
    }

    /// Every pair of formats and of granularities, with and without a bias, for every output; then
    /// the GEMM's settings.
    fn gemms(&self) {
        let [f32, f16, bf16] = dtypes();
        let outputs = || [f32, f16, bf16].into_iter().filter(|dtype| supports(&self.client, *dtype));
        let base = Product {
            shape: LARGE,
            formats: [Format::E4m3; 2],
            granularities: [Granularity::Tensor; 2],
            bias: None,
            out: bf16,
            power_of_two: false,
            config: GemmConfig::default(),
        };
        for (a, b) in pairs(Format::ALL) {
            self.gemm(Product { formats: [a, b], ..base });
        }
        for (a, b) in pairs(GRANULARITIES) {
            self.gemm(Product { granularities: [a, b], ..base });
        }
        for granularity in GRANULARITIES {
            self.gemm(Product { granularities: [granularity, MX], ..base });
            self.gemm(Product { granularities: [MX, granularity], ..base });
        }
        for (a, b) in pairs(Format::ALL) {
            self.gemm(Product { formats: [a, b], granularities: [MX; 2], ..base });
        }
        for format in Format::ALL {
            dequantize_mx(&self.client, &self.operand([300, 500], format, MX)).expect("E8M0 scales");
            for (granularity, k) in Granularity::ALL.into_iter().flat_map(|g| [500, 501].map(|k| (g, k))) {
                dequantize_to_f32(&self.client, &self.operand([300, k], format, granularity)).expect("an operand");
            }
        }
        for granularity in [Granularity::Tensor, Granularity::Block128x128, MX] {
            transpose(&self.client, &self.operand([300, 500], Format::E4m3, granularity)).expect("symmetric scales");
        }
        self.blocks(base);
        self.few_rows(base);
        for out in outputs() {
            for bias in dtypes() {
                self.gemm(Product { granularities: [Granularity::Row; 2], bias: Some(bias), out, ..base });
            }
            self.gemm(Product { granularities: [Granularity::Block128x128; 2], out, ..base });
            self.gemm(Product { granularities: [MX; 2], bias: Some(bf16), out, ..base });
            self.gemm(Product { shape: ODD, out, ..base });
        }
        for (use_fast_accum, emulate) in pairs([false, true]) {
            self.gemm(Product { config: GemmConfig { use_fast_accum, emulate }, ..base });
            self.gemm(Product { granularities: [MX; 2], config: GemmConfig { use_fast_accum, emulate }, ..base });
        }
        for k in BLOCK_LENGTHS {
            for granularities in [[Granularity::Block1x128, Granularity::Block128x128], [Granularity::Block1x128; 2]] {
                for [m, n, _] in [LARGE, MEDIUM, LOW] {
                    self.gemm(Product { shape: [m, n, k], granularities, ..base });
                }
            }
        }
        for shape in [MEDIUM, FEW_ROWS, NARROW, SQUARE, LOW, WIDE, DEEP] {
            for granularities in [
                [Granularity::Tensor; 2],
                [Granularity::Block1x128; 2],
                [Granularity::Block1x128, Granularity::Block128x128],
                [Granularity::Row; 2],
                [MX; 2],
                [MX, Granularity::Block1x128],
            ] {
                self.gemm(Product { shape, granularities, bias: Some(bf16), ..base });
            }
            self.gemm(Product { shape, config: GemmConfig { use_fast_accum: true, emulate: false }, ..base });
        }
    }

    /// The GEMV for each number of rows, every pair of granularities and of formats, and every
    /// output, with and without bias.
    fn few_rows(&self, base: Product) {
        for rows in 1..=GEMV_ROWS {
            let base = Product { shape: [rows, 4096, 4096], ..base };
            for (a, b) in pairs(Granularity::ALL) {
                self.gemm(Product { granularities: [a, b], ..base });
            }
            for (a, b) in pairs(Format::ALL) {
                for granularity in [Granularity::Row, MX] {
                    self.gemm(Product { formats: [a, b], granularities: [granularity; 2], ..base });
                }
            }
            for out in dtypes().into_iter().filter(|dtype| supports(&self.client, *dtype)) {
                self.gemm(Product { out, bias: Some(out), ..base });
            }
        }
    }

    /// Scales of blocks for every output and class of tile, with and without bias,
    /// if sums are in tensor memory.
    fn blocks(&self, base: Product) {
        if gemm_path(&self.client, base.granularities, base.config) != GemmPath::Tcgen05 {
            return;
        }
        for (a, b) in pairs(GRANULARITIES) {
            self.gemm(Product { granularities: [a, b], power_of_two: true, ..base });
        }
        for granularities in
            [[MX; 2], [Granularity::Block1x128, Granularity::Block128x128], [Granularity::Block1x128; 2]]
        {
            let base = Product { granularities, ..base };
            for out in dtypes().into_iter().filter(|dtype| supports(&self.client, *dtype)) {
                for shape in [LARGE, ODD, MEDIUM, FEW_ROWS, NARROW, BROAD, DEEP] {
                    self.gemm(Product { shape, out, ..base });
                    self.gemm(Product { shape, out, bias: Some(out), ..base });
                }
            }
        }
    }

    /// Groups of the rows and of the contraction. Outputs with many tiles, few, and narrow ones,
    /// groups without rows for a cluster's second block, and rows that start at odd elements.
    fn grouped(&self) {
        let [f32, f16, bf16] = dtypes();
        let products = [
            (8192, 4096, bf16),
            (8192, 4096, f32),
            (512, 8192, bf16),
            (1024, 1024, f16),
            (16384, 48, bf16),
            (2048, 2047, bf16),
            (128, 128, f32),
        ];
        let one = |granularity| [granularity; 2];
        for granularity in [Granularity::Tensor, Granularity::Row, MX] {
            for (m, n, out) in products.into_iter().filter(|(_, _, out)| supports(&self.client, *out)) {
                self.group([m, n], [Format::E4m3; 2], one(granularity), out, GemmConfig::default());
            }
            for (use_fast_accum, emulate) in [(true, false), (false, true)] {
                let config = GemmConfig { use_fast_accum, emulate };
                self.group([8192, 4096], [Format::E4m3; 2], one(granularity), bf16, config);
            }
            for (a, b) in pairs(Format::ALL).skip(1) {
                self.group([8192, 4096], [a, b], one(granularity), bf16, GemmConfig::default());
            }
        }
        for granularities in
            [[Granularity::Row, Granularity::Tensor], [Granularity::Tensor, MX], [Granularity::Block1x128, MX]]
        {
            self.group([8192, 4096], [Format::E4m3; 2], granularities, bf16, GemmConfig::default());
        }
        for granularities in [[Granularity::Block1x128, Granularity::Block128x128], one(Granularity::Block1x128)] {
            for (m, n, out) in products.into_iter().filter(|(_, _, out)| supports(&self.client, *out)) {
                self.group([m, n], [Format::E4m3; 2], granularities, out, GemmConfig::default());
            }
        }
    }

    /// Four groups of the rows, and of the contraction.
    fn group(
        &self,
        [m, n]: [usize; 2],
        formats: [Format; 2],
        granularities: [Granularity; 2],
        out: StorageType,
        config: GemmConfig,
    ) {
        for grouping in [Grouping::Rows, Grouping::Contraction] {
            let count = 4;
            let rows_b = if grouping == Grouping::Rows { n * count } else { n };
            let a = self.operand([m, 512], formats[0], granularities[0]);
            let b = self.operand([rows_b, 512], formats[1], granularities[1]);
            let groups = Groups { ends: self.memory(4 * count), count, grouping };
            grouped_scaled_gemm(&self.client, &a, &b, &groups, out, config).expect("operands that fit");
        }
    }

    fn gemm(&self, product: Product) {
        let Product { shape: [m, n, k], formats, granularities, bias, out, power_of_two, config } = product;
        let operand = |side: usize, rows| {
            let operand = self.operand([rows, k], formats[side], granularities[side]);
            Operand { power_of_two: power_of_two || operand.power_of_two, ..operand }
        };
        let (a, b) = (operand(0, m), operand(1, n));
        let bias = bias.map(|dtype| {
            let handle = self.memory(n * dtype.size());
            VectorView { handle, len: n, stride: 1, dtype }
        });
        scaled_gemm(&self.client, &a, &b, bias.as_ref(), out, config).expect("operands that fit");
    }
}

/// M, N and K of each class of output: many tiles, too few large ones, few rows, and rows that
/// start at odd elements.
const LARGE: [usize; 3] = [2048, 2048, 512];
const MEDIUM: [usize; 3] = [1024, 1024, 512];
const FEW_ROWS: [usize; 3] = [16, 512, 512];
const ODD: [usize; 3] = [2048, 2047, 512];

/// Shapes for Hopper's other tiles: 128 by 64, 128 by 128, 64 by 256, and 128 by 256 without
/// clusters; and split-K.
const NARROW: [usize; 3] = [16384, 48, 512];
const SQUARE: [usize; 3] = [2048, 1024, 512];
const LOW: [usize; 3] = [64, 33024, 512];
const WIDE: [usize; 3] = [384, 8192, 512];
const DEEP: [usize; 3] = [256, 256, 65536];

/// Contractions whose rows of block scales are loaded one by one and two at a time; the other
/// shapes load four at a time.
const BLOCK_LENGTHS: [usize; 2] = [640, 768];

/// Shape for Blackwell's widest tiles with scales of blocks.
const BROAD: [usize; 3] = [2048, 1536, 512];

/// GEMM to launch.
#[derive(Clone, Copy)]
struct Product {
    shape: [usize; 3],
    formats: [Format; 2],
    granularities: [Granularity; 2],
    bias: Option<StorageType>,
    out: StorageType,
    /// Whether f32 scales are powers of two.
    power_of_two: bool,
    config: GemmConfig,
}

/// Every ordered pair.
fn pairs<T: Copy, const N: usize>(values: [T; N]) -> impl Iterator<Item = (T, T)> {
    values.into_iter().flat_map(move |a| values.into_iter().map(move |b| (a, b)))
}
