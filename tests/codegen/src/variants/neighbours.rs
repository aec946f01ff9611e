//! Variants of what stands beside linears, and of the casts that make it.

use float8_kernels::fused::{self, FusedInputs};
use float8_kernels::{Cast, Format, Granularity, ScaleCalculationMode, ScaleMode, quantize_fused};

use super::{GRANULARITIES, Launcher, MX, ORIENTATIONS, dtypes};

impl Launcher {
    /// SwiGLU, RMSNorm and rotary positions of every dtype, by vector loads and by scalar loads, in rows of one unit and of many.
    pub(super) fn neighbours(&self) {
        let client = &self.client;
        let [f32, f16, bf16] = dtypes();
        for dtype in dtypes() {
            for cols in [4, 255, 256, 4096] {
                let shape = [64, cols];
                let [a, b, dy] = [(); 3].map(|()| self.matrix(shape, cols, dtype));
                fused::swiglu(client, &a, &b).expect("valid views");
                if cols < 4096 {
                    self.fused_casts(FusedInputs::SwiGlu { a: &a, b: &b });
                }
                for with_maxima in [false, true] {
                    fused::swiglu_backward(client, &a, &b, &dy, with_maxima).expect("valid views");
                }
                for gamma in [f32, dtype] {
                    let gamma = self.matrix([1, cols], cols, gamma);
                    fused::rms_norm(client, &a, &gamma, 1e-5).expect("valid views");
                    // What f16 and bf16 differ in, SwiGLU's casts show.
                    if cols == 256 && dtype != f16 || cols == 255 && [dtype, gamma.dtype] == [bf16; 2] {
                        let inverse_rms = &fused::inverse_rms(client, &a, &gamma, 1e-5).expect("valid views");
                        self.fused_casts(FusedInputs::RmsNorm { x: &a, gamma: &gamma, inverse_rms });
                    }
                    fused::rms_norm_backward(client, &a, &gamma, &dy, 1e-5).expect("valid views");
                }
            }
            for half in [5, 64] {
                let x = self.matrix([64, 2 * half], 2 * half, dtype);
                let table = self.matrix([8, half], half, f32);
                for ways in [(false, false), (true, false), (true, true)] {
                    fused::rotary(client, &x, [&table, &table], [2, 8, 4], ways).expect("valid views");
                }
            }
        }
    }

    /// The cast of SwiGLU or RMSNorm of every granularity, in each orientation, and where the amax is observed.
    fn fused_casts(&self, inputs: FusedInputs<'_>) {
        let casts = GRANULARITIES.map(|granularity| (granularity, ScaleMode::F32));
        let casts = casts.into_iter().chain([(MX, ScaleMode::E8m0(ScaleCalculationMode::Rceil))]);
        for (granularity, scale_mode) in casts {
            let cast = Cast { format: Format::E4m3, granularity, scale_mode };
            for orientation in ORIENTATIONS {
                let amax = self.memory(4);
                let amaxes = match granularity {
                    Granularity::Tensor => vec![Some((&amax, false)), Some((&amax, true))],
                    _ => vec![None],
                };
                for amax in amaxes {
                    quantize_fused(&self.client, inputs, amax, cast, orientation).expect("valid views");
                }
            }
        }
    }
}
