//! Variants of fused operations and of AdamW.

use float8_kernels::adamw::{AdamWArgs, AdamWStep, RoundingKeys, adamw};
use float8_kernels::fused;

use super::{Launcher, dtypes};

impl Launcher {
    /// SwiGLU, RMSNorm and rotary positions in every dtype, with vector and scalar loads, and with
    /// one and many units per row.
    pub(super) fn fused(&self) {
        let client = &self.client;
        let [f32, ..] = dtypes();
        for dtype in dtypes() {
            for cols in [4, 255, 256, 4096] {
                let shape = [64, cols];
                let [a, b, dy] = [(); 3].map(|()| self.matrix(shape, cols, dtype));
                fused::swiglu(client, &a, &b).expect("valid views");
                fused::swiglu_backward(client, &a, &b, &dy).expect("valid views");
                for gamma in [f32, dtype] {
                    let gamma = self.matrix([1, cols], cols, gamma);
                    fused::rms_norm(client, &a, &gamma, 1e-5).expect("valid views");
                    fused::rms_norm_backward(client, &a, &gamma, &dy, 1e-5).expect("valid views");
                }
            }
            for half in [5, 64] {
                let x = self.matrix([64, 2 * half], 2 * half, dtype);
                let table = self.matrix([8, half], half, f32);
                for back in [false, true] {
                    fused::rotary(client, &x, [&table, &table], [2, 8, 4], back).expect("valid views");
                }
            }
        }
    }

    /// AdamW of parameters in f32 and bf16 with moments in either, with vector and scalar loads.
    pub(super) fn adamw(&self) {
        let [f32, _, bf16] = dtypes();
        for (param, moments) in [(f32, f32), (f32, bf16), (bf16, f32), (bf16, bf16)] {
            for cols in [255, 256] {
                let view = |dtype| self.matrix([64, cols], cols, dtype);
                let args = AdamWArgs { param: view(param), moments: [view(moments), view(moments)], grad: view(param) };
                let keys = |dtype| (dtype == bf16).then(|| RoundingKeys(vec![vec![0; 64], vec![0; cols]]));
                let rounding = [keys(param), keys(moments), keys(moments)];
                let step = AdamWStep { lr: 0.1, betas: [0.9; 2], epsilon: 1e-8, decay: None, time: 2, rounding };
                adamw(&self.client, &step, &args, &[64, cols], true).expect("valid views");
            }
        }
    }
}
