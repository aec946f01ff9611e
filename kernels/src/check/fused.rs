//! Checks fused operations against the scalar reference, within a rounding error of the largest
//! value.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{Flaw, floats, read, split_mix, upload};
use crate::element_type::ElementType;
use crate::fused::{self, FusedKernel};
use crate::ptx::cvt::Isa;
use crate::reference::fused as reference;
use crate::view::Checked;
use crate::{KernelError, MatrixView};

/// Compile-time parameters of a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FusedVariant {
    /// The operation.
    pub kernel: FusedKernel,
    /// Whether to run the gradient.
    pub backward: bool,
    /// Length of a row (the last axis).
    cols: usize,
    /// The dtype of x.
    dtype: StorageType,
    /// The dtype of γ, or of x without γ.
    gamma: StorageType,
    /// Elements before the first one of each view. One prevents vector loads.
    base: usize,
    /// Instructions of kernels that use some, otherwise [`Portable`](Isa::Portable).
    isa: Isa,
}

/// Rows. For rotary embeddings: two sequences of seven positions with three heads.
const ROWS: usize = 2 * 7 * 3;

const EPSILON: f32 = 1e-5;

impl FusedVariant {
    /// Variant that the operation runs on this device for its matrices: x first, then for RMSNorm
    /// γ.
    ///
    /// # Errors
    /// The errors of the operation for a matrix.
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        kernel: FusedKernel,
        backward: bool,
        matrices: &[MatrixView],
    ) -> Result<Self, KernelError> {
        let x = &matrices[0];
        let (gamma, isa) = match kernel {
            FusedKernel::RmsNorm => (matrices[1].dtype, Isa::of(client)),
            FusedKernel::SwiGlu | FusedKernel::Rotary => (x.dtype, Isa::Portable),
        };
        let mut base = 0;
        for matrix in matrices {
            base = base.max(usize::from(!Checked::new(client, matrix)?.starts_at_vector()));
        }
        Ok(Self { kernel, backward, cols: x.shape[1], dtype: x.dtype, gamma, base, isa })
    }

    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        let &Self { kernel, backward, cols, dtype, gamma, base, .. } = self;
        let f32 = ElementType::F32.storage();
        let values = |rows: usize, cols: usize, seed: u64| -> Vec<f32> {
            (0..rows * cols).map(|i| (split_mix(seed, i as u64) >> 40) as f32 / (1 << 22) as f32 - 2.0).collect()
        };
        let upload = |values: &[f32], cols, dtype| upload(client, values, cols, dtype, base);
        let matrix = |i: u64| upload(&values(ROWS, cols, seed + i), cols, dtype);
        let ((a, x), (b, y), (d, dy)) = (matrix(1)?, matrix(2)?, matrix(3)?);
        // Largest term of a result. Errors are relative to it where terms cancel.
        let mut term = 0f64;
        let results = match kernel {
            FusedKernel::SwiGlu if backward => {
                let [da, db] = fused::swiglu_backward(client, &a, &b, &d)?;
                let [x, y] = reference::swiglu_backward(&x, &y, &dy);
                vec![(da, dtype, x), (db, dtype, y)]
            }
            FusedKernel::SwiGlu => vec![(fused::swiglu(client, &a, &b)?, dtype, reference::swiglu(&x, &y))],
            FusedKernel::RmsNorm => {
                let (g, gamma) = upload(&values(1, cols, seed), cols, gamma)?;
                if backward {
                    for (x, dy) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)) {
                        let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / cols as f64;
                        let terms = dy.iter().zip(&gamma).map(|(dy, gamma)| f64::from(dy * gamma).abs());
                        term = term.max(terms.fold(0f64, f64::max) / (mean + f64::from(EPSILON)).sqrt());
                    }
                    let [dx, dgamma] = fused::rms_norm_backward(client, &a, &g, &d, EPSILON)?;
                    let [x, gamma] = reference::rms_norm_backward(&x, &gamma, &dy, EPSILON.into());
                    vec![(dx, dtype, x), (dgamma, f32, gamma)]
                } else {
                    let made = fused::rms_norm(client, &a, &g, EPSILON)?;
                    vec![(made, dtype, reference::rms_norm(&x, &gamma, EPSILON.into()))]
                }
            }
            FusedKernel::Rotary => {
                let table = |i: u64| upload(&values(7, cols / 2, seed + i), cols / 2, f32);
                let ((c, cos), (s, sin)) = (table(4)?, table(5)?);
                let made = fused::rotary(client, &a, [&c, &s], [2, 7, 3], backward)?;
                vec![(made, dtype, reference::rotary(&x, [&cos, &sin], [2, 7, 3, cols], backward))]
            }
        };
        for (i, (made, dtype, want)) in results.into_iter().enumerate() {
            let tolerance = match ElementType::of(dtype)? {
                ElementType::F32 => 1e-5,
                ElementType::F16 => 1e-3,
                ElementType::Bf16 => 8e-3,
            };
            let largest = want.iter().fold(term, |largest, x| largest.max(x.abs()));
            let got = floats(&read(client, &[&made])?[0], dtype)?;
            let is_near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= tolerance * largest;
            if let Some(at) = got.iter().zip(&want).position(|pair| !is_near(pair)) {
                let (got, want) = (got[at], want[at]);
                return Err(Flaw::Wrong(format!("element {at} of result {i} is {got:e}, not {want:e}")));
            }
        }
        Ok(())
    }
}

impl fmt::Display for FusedVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, backward, cols, dtype, base, .. } = self;
        write!(f, "{kernel:?}{} of [{ROWS}, {cols}] {dtype}", if *backward { " backward" } else { "" })?;
        if *base > 0 { f.write_str(", unaligned") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::wgpu::WgpuRuntime;

    use super::*;

    /// A view inside a vector takes other loads, so it is another variant. Both are right.
    #[test]
    fn unaligned_views_are_another_variant() {
        let Ok(client) = std::panic::catch_unwind(|| WgpuRuntime::client(&Default::default())) else {
            return test_data::skip(test_data::VULKAN);
        };
        let dtype = ElementType::F32.storage();
        let matrix = |rows: usize, base: usize| upload(&client, &vec![1.0; 64 * rows], 64, dtype, base).expect("f32").0;
        for kernel in [FusedKernel::SwiGlu, FusedKernel::RmsNorm] {
            let rows = if kernel == FusedKernel::RmsNorm { 1 } else { 3 };
            let [aligned, unaligned] = [0, 1].map(|base| {
                let matrices = [matrix(3, 0), matrix(rows, base)];
                FusedVariant::of(&client, kernel, false, &matrices).expect("f32")
            });
            assert_ne!(aligned, unaligned);
            assert_eq!((aligned.judge(&client, 3), unaligned.judge(&client, 4)), (Ok(()), Ok(())));
        }
    }
}
