//! Checks products of 16-bit matrices on multiples of 1/2 up to 3/2, whose sums are exact in f32. So
//! results must equal the scalar reference bit for bit.
//!
//! Tiles are ragged, rows are padded with NaN in memory, and there is a bias. A NaN reaches a whole
//! row and an infinity a whole column.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{Flaw, floats, in_dtype, read, split_mix};
use crate::gemm::{HalfGemm, HalfGemmProblem, HalfGemmVariant};
use crate::reference::matmul_f64;
use crate::{KernelError, MatrixView, VectorView};

impl HalfGemmVariant {
    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        self.small.check(client, Some(self), seed)
    }
}

impl HalfGemmProblem {
    /// Runs the GEMM on generated matrices, and compares each element with the scalar reference.
    /// Without a variant, the client's device determines it.
    ///
    /// # Errors
    /// The first flaw.
    pub fn check<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        variant: Option<&HalfGemmVariant>,
        seed: u64,
    ) -> Result<(), Flaw> {
        let &Self { product: [m, n, k], row_major: [a_by_rows, b_by_rows], dtype, bias: bias_dtype, out } = self;
        let values = |side: u64, len: usize| -> Vec<f32> {
            (0..len).map(|i| (split_mix(seed + side, i as u64) % 7) as f32 / 2.0 - 1.5).collect()
        };
        let (mut a, mut b) = (values(0, m * k), values(1, k * n));
        // With few rows, NaN and infinity would leave few finite results.
        if m > 8 {
            a[m / 2 * k + k - 1] = f32::NAN;
            b[(k - 1) * n + n / 3] = f32::INFINITY;
        }
        let (left, right) =
            (upload(client, &a, [m, k], a_by_rows, dtype)?, upload(client, &b, [k, n], b_by_rows, dtype)?);
        let bias: Vec<f32> = (0..n).map(|col| (col * 7 % 9) as f32 / 2.0 - 2.0).collect();
        let view = bias_dtype.map(|dtype| {
            let (bytes, _) = in_dtype(&bias, dtype)?;
            Ok::<_, Flaw>(VectorView { handle: client.create_from_slice(&bytes), len: n, stride: 1, dtype })
        });
        let view = view.transpose()?;
        let gemm = HalfGemm { a: &left, b: &right, bias: view.as_ref(), out };
        let made = match variant {
            Some(variant) => gemm.run(client, variant)?,
            None => gemm.run(client, &gemm.variant(client)?)?,
        };
        let got = floats(&read(client, &[&made])?[0], out)?;
        let sums = matmul_f64(&a, &b, self.product, bias_dtype.map(|_| &bias[..]));
        let (_, want) = in_dtype(&sums.into_iter().map(|sum| sum as f32).collect::<Vec<_>>(), out)?;
        let differs = |(got, want): (&f32, &f32)| got != want && !(got.is_nan() && want.is_nan());
        match got.iter().zip(&want).position(differs) {
            None => Ok(()),
            Some(i) => Err(Flaw::Wrong(format!("[{}, {}] is {:e}, not {:e}", i / n, i % n, got[i], want[i]))),
        }
    }
}

/// Uploads a matrix of 16-bit floats by rows or by columns, whose lines are a multiple of 8 elements
/// apart. NaN fills the rest.
fn upload<R: Runtime>(
    client: &ComputeClient<R>,
    values: &[f32],
    [rows, cols]: [usize; 2],
    by_rows: bool,
    dtype: StorageType,
) -> Result<MatrixView, KernelError> {
    let (lines, len) = if by_rows { (rows, cols) } else { (cols, rows) };
    let apart = (len + 1).next_multiple_of(8);
    let mut padded = vec![f32::NAN; lines * apart];
    for (i, value) in values.iter().enumerate() {
        let (row, col) = (i / cols, i % cols);
        padded[if by_rows { row * apart + col } else { col * apart + row }] = *value;
    }
    let handle = client.create_from_slice(&in_dtype(&padded, dtype)?.0);
    let strides = if by_rows { [apart, 1] } else { [1, apart] };
    Ok(MatrixView { handle, shape: [rows, cols], strides, dtype })
}
