//! Checks fused operations against the scalar reference, within a rounding error of the largest
//! value.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{Flaw, floats, read, split_mix, upload};
use crate::fused::{self, FusedKernel};
use crate::reference::fused as reference;
use crate::source::Source;

/// Compile-time parameters of a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FusedVariant {
    /// The operation.
    pub kernel: FusedKernel,
    /// Whether to run the gradient.
    pub backward: bool,
    /// Length of a row (the last axis).
    pub cols: usize,
    /// The dtype of x.
    pub dtype: StorageType,
    /// The dtype of γ.
    pub gamma: StorageType,
}

/// Rows. For rotary embeddings: two sequences of seven positions with three heads.
const ROWS: usize = 2 * 7 * 3;

const EPSILON: f32 = 1e-5;

impl FusedVariant {
    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        let &Self { kernel, backward, cols, dtype, gamma } = self;
        let f32 = Source::F32.storage();
        let values = |rows: usize, cols: usize, seed: u64| -> Vec<f32> {
            (0..rows * cols).map(|i| (split_mix(seed, i as u64) >> 40) as f32 / (1 << 22) as f32 - 2.0).collect()
        };
        let matrix = |i: u64| upload(client, &values(ROWS, cols, seed + i), cols, dtype);
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
                let (g, gamma) = upload(client, &values(1, cols, seed), cols, gamma)?;
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
                let table = |i: u64| upload(client, &values(7, cols / 2, seed + i), cols / 2, f32);
                let ((c, cos), (s, sin)) = (table(4)?, table(5)?);
                let made = fused::rotary(client, &a, [&c, &s], [2, 7, 3], backward)?;
                vec![(made, dtype, reference::rotary(&x, [&cos, &sin], [2, 7, 3, cols], backward))]
            }
        };
        for (i, (made, dtype, want)) in results.into_iter().enumerate() {
            let tolerance = match Source::of(dtype)? {
                Source::F32 => 1e-5,
                Source::F16 => 1e-3,
                Source::Bf16 => 8e-3,
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
        let Self { kernel, backward, cols, dtype, .. } = self;
        write!(f, "{kernel:?}{} of [{ROWS}, {cols}] {dtype}", if *backward { " backward" } else { "" })
    }
}
