//! Variants of products of 16-bit matrices.

use cubecl_core::ir::StorageType;
use float8_kernels::{HalfGemm, MatrixView, VectorView, has_half_gemm};

use super::{DEEP, LARGE, LOW, Launcher, MEDIUM, NARROW, ODD, SQUARE, WIDE, dtypes, pairs};

impl Launcher {
    /// Both orders of each matrix, for each class of tile, every output with and without a bias, and
    /// both dtypes.
    pub(super) fn halves(&self) {
        if !has_half_gemm(&self.client) {
            return;
        }
        let [f32, f16, bf16] = dtypes();
        for by_rows in pairs([true, false]).map(<[bool; 2]>::from) {
            for shape in [LARGE, MEDIUM, NARROW, SQUARE, LOW, WIDE, DEEP] {
                self.half_gemm(shape, by_rows, [bf16; 2], None);
            }
            self.half_gemm(LARGE, by_rows, [bf16, f32], None);
            self.half_gemm(LARGE, by_rows, [f16; 2], Some(f32));
        }
        for (out, bias) in pairs([f32, f16, bf16]) {
            self.half_gemm(LARGE, [true; 2], [bf16, out], Some(bias));
        }
        // Rows of the output that TMA cannot write.
        self.half_gemm(ODD, [true, false], [bf16; 2], None);
    }

    /// A product of matrices by rows or by columns, with these dtypes of the matrices and the output.
    fn half_gemm(
        &self,
        [m, n, k]: [usize; 3],
        by_rows: [bool; 2],
        [dtype, out]: [StorageType; 2],
        bias: Option<StorageType>,
    ) {
        let [a, b] = [([m, k], by_rows[0]), ([k, n], by_rows[1])].map(|([rows, cols], by_rows)| {
            let handle = self.memory(rows * cols * dtype.size());
            let strides = if by_rows { [cols, 1] } else { [1, rows] };
            MatrixView { handle, shape: [rows, cols], strides, dtype }
        });
        let bias = bias.map(|dtype| VectorView { handle: self.memory(n * dtype.size()), len: n, stride: 1, dtype });
        let gemm = HalfGemm { a: &a, b: &b, bias: bias.as_ref(), out };
        let variant = gemm.variant(&self.client).expect("matrices that fit");
        gemm.run(&self.client, &variant).expect("matrices that fit");
    }
}
