//! AdamW in every dtype that a device stores, and products of 16-bit matrices in each order of their
//! elements. The library's own checks compare them with their definitions.

use cubecl::prelude::*;
use float8_kernels::check::{AdamWVariant, Variant};
use float8_kernels::{CudaArch, HalfGemmProblem, cuda_arch};

use crate::case::{Cases, wrong};
use crate::data::{BF16, DTYPES, F16, F32};

/// Ragged sizes: one tile, several, edges of 64 on each axis, and a long contraction.
const SHAPES: [[usize; 3]; 5] = [[70, 133, 200], [300, 520, 130], [65, 64, 65], [17, 9, 3], [200, 67, 4100]];

const LARGE: [[usize; 3]; 2] = [[1024, 1024, 1024], [4096, 1000, 2048]];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    add_adamw(all);
    add_halves(all);
}

fn add_adamw<R: Runtime>(all: &mut Cases<'_, R>) {
    for param in DTYPES {
        for moments in DTYPES {
            for rounded in [[false; 2], [true; 2]] {
                let grad = if moments == F32 { F32 } else { param };
                let variant = AdamWVariant { param, moments, grad, rounded };
                let name = format!("adamw {param} {moments}{}", if rounded[0] { " rounded" } else { "" });
                all.add(name, move |client| {
                    if !variant.is_supported(client) {
                        return Ok(0.0);
                    }
                    match Variant::AdamW(variant).judge(client, 5) {
                        Ok(()) => Ok(0.0),
                        Err(flaw) => Err(wrong!("{flaw}")),
                    }
                });
            }
        }
    }
}

fn add_halves<R: Runtime>(all: &mut Cases<'_, R>) {
    if cuda_arch(all.client) != Some(CudaArch::Sm90) {
        return;
    }
    for (i, product) in all.sizes(&SHAPES, &LARGE).into_iter().enumerate() {
        for (j, row_major) in [[true, true], [true, false], [false, true], [false, false]].into_iter().enumerate() {
            // Each output, with and without a bias, and each dtype.
            let (dtype, out) = ([BF16, F16][(i + j) % 2], [F32, BF16, F16][(i + j) % 3]);
            let problem = HalfGemmProblem { product, row_major, dtype, bias: (j % 2 == 0).then_some(F32), out };
            let [m, n, k] = product;
            let [a, b] = row_major.map(|by_rows| if by_rows { "" } else { "ᵀ" });
            all.add(format!("matmul_halves {m}x{n}x{k} x{a} w{b} {dtype} {out}"), move |client| {
                problem.check(client, None, 5).map(|()| 0.0).map_err(|flaw| wrong!("{flaw}"))
            });
        }
    }
}
