//! Launches of every kernel variant that the library has, so that their CUDA is generated: each dtype, layout, format,
//! scale, orientation and size class that selects other code.

use std::collections::BTreeMap;

use cubecl_core::Runtime;
use cubecl_core::ir::{ElemType, FloatKind, StorageType};
use cubecl_core::server::Handle;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::{
    Cast, Format, GemmConfig, Granularity, MatrixView, Operand, Orientation, ScaleMode, VectorView, amax, health,
    quantize, quantize_with_amax, row_words, scaled_gemm, supports,
};

use crate::device::{GenerateCuda, Generated, PaperDevice, take};

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
const MODES: [ScaleMode; 2] = [ScaleMode::F32, ScaleMode::PowerOfTwo];
const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];
const GRANULARITIES: [Granularity; 4] =
    [Granularity::Tensor, Granularity::Row, Granularity::Block1x128, Granularity::Block128x128];

/// Contraction lengths that give every plan of the rowwise cast: each number of units per row and of words that a unit
/// keeps, and a row too long to keep.
const ROW_LENGTHS: [usize; 14] = [16, 48, 128, 144, 256, 272, 512, 1024, 2048, 4096, 8192, 12288, 16384, 32768];

fn dtypes() -> [StorageType; 3] {
    [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(|kind| StorageType::Scalar(ElemType::Float(kind)))
}

/// The CUDA of every variant for compute capability `sm`, one for each distinct source.
///
/// # Panics
/// If a kernel cannot be generated.
pub fn generate(sm: u16) -> Vec<Generated> {
    let launcher = Launcher { client: GenerateCuda::client(&PaperDevice { sm }) };
    launcher.quantize();
    launcher.rows();
    launcher.gemms();
    // Kernels are generated on the device's thread.
    cubecl_common::future::block_on(launcher.client.sync()).expect("nothing runs");
    let distinct: BTreeMap<_, _> = take().into_iter().map(|kernel| (kernel.source.clone(), kernel)).collect();
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

    /// Casts and health of every dtype, by vector loads and, where rows are ragged, by scalar loads.
    fn quantize(&self) {
        for dtype in dtypes() {
            for cols in [256, 255] {
                let x = self.matrix([130, cols], cols, dtype);
                amax(&self.client, &x).expect("a valid view");
                for format in FORMATS {
                    for granularity in GRANULARITIES {
                        for scale_mode in MODES {
                            self.casts(&x, Cast { format, granularity, scale_mode });
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
        let inv_scale = self.memory(granularity.scale_dims(rows, k).iter().product::<usize>() * 4);
        Operand { codes, inv_scale, rows, k, format, granularity }
    }

    /// Every pair of formats and of granularities, with and without a bias, for every output; and the settings of the GEMM.
    fn gemms(&self) {
        let [m, n, k] = [256, 384, 512];
        for (a, b) in pairs(FORMATS) {
            self.gemm([m, n, k], [a, b], [Granularity::Tensor; 2], None, dtypes()[0], GemmConfig::default());
        }
        for (a, b) in pairs(GRANULARITIES) {
            self.gemm([m, n, k], [Format::E4m3; 2], [a, b], None, dtypes()[2], GemmConfig::default());
        }
        for out in dtypes().into_iter().filter(|dtype| supports(&self.client, *dtype)) {
            for bias in dtypes() {
                self.gemm([m, n, k], [Format::E4m3; 2], [Granularity::Row; 2], Some(bias), out, GemmConfig::default());
            }
        }
        for (use_fast_accum, emulate) in pairs([false, true]) {
            let config = GemmConfig { use_fast_accum, emulate };
            self.gemm([m, n, k], [Format::E4m3; 2], [Granularity::Tensor; 2], None, dtypes()[2], config);
        }
    }

    fn gemm(
        &self,
        [m, n, k]: [usize; 3],
        formats: [Format; 2],
        granularities: [Granularity; 2],
        bias: Option<StorageType>,
        out: StorageType,
        config: GemmConfig,
    ) {
        let a = self.operand([m, k], formats[0], granularities[0]);
        let b = self.operand([n, k], formats[1], granularities[1]);
        let bias = bias.map(|dtype| {
            let handle = self.memory(n * dtype.size());
            VectorView { handle, len: n, stride: 1, dtype }
        });
        scaled_gemm(&self.client, &a, &b, bias.as_ref(), out, config).expect("operands that fit");
    }
}

/// Every ordered pair.
fn pairs<T: Copy, const N: usize>(values: [T; N]) -> impl Iterator<Item = (T, T)> {
    values.into_iter().flat_map(move |a| values.into_iter().map(move |b| (a, b)))
}
