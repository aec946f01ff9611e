//! Attention's kernels against the definition in f64, element by element.

use cubecl::prelude::*;
use float8_kernels::attention::{
    AttentionInputs, AttentionKernel, AttentionOutput, HeadsView, attention_forward, has_attention,
};
use float8_kernels::check::{AttentionCase, Flaw, MASK_BYTES, MASK_WORDS};
use float8_kernels::supports;
use test_data::normal;

use crate::Failure;
use crate::case::Cases;
use crate::data::{DTYPES, F32};
use crate::device::{poison, read_f32, upload_f32};

/// One row, ragged and whole tiles, more keys than queries and fewer, grouped heads, several slices,
/// keys in parts, and each mode. Cases with the same modes run the same kernels.
fn cases() -> Vec<(&'static str, AttentionCase)> {
    let case = |heads, positions, widths| AttentionCase::causal(heads, positions, widths, F32);
    let softcap = Some(1.5);
    vec![
        ("one", case([1, 1, 1], [1, 1], [1, 1])),
        ("odd", case([1, 2, 2], [65, 65], [5, 7])),
        ("one_query", case([2, 4, 2], [1, 130], [16, 16])),
        ("few", case([2, 8, 2], [1, 700], [64, 64])),
        (
            "few_masked",
            AttentionCase {
                mask: Some(([false, true, true, false], MASK_WORDS)),
                bias: Some([true, false, false, false]),
                softcap,
                ..case([2, 4, 2], [1, 600], [16, 8])
            },
        ),
        ("several", AttentionCase { mask: Some(([false; 4], MASK_BYTES)), ..case([1, 2, 1], [5, 600], [24, 72]) }),
        ("grouped", case([1, 4, 2], [200, 200], [64, 64])),
        ("more_keys", case([1, 2, 1], [70, 300], [24, 24])),
        ("more_queries", case([1, 2, 1], [150, 20], [8, 24])),
        ("strided", AttentionCase { strided: true, ..case([2, 4, 2], [130, 130], [32, 16]) }),
        ("wide", case([1, 2, 1], [70, 90], [128, 96])),
        ("documents", AttentionCase { documents: true, ..case([2, 2, 1], [260, 260], [16, 16]) }),
        (
            "mask",
            AttentionCase {
                mask: Some(([false; 4], MASK_WORDS)),
                causal: false,
                ..case([2, 2, 2], [150, 200], [16, 16])
            },
        ),
        (
            "mask_of_keys",
            AttentionCase {
                mask: Some(([false, true, true, false], MASK_BYTES)),
                bias: Some([true, false, false, false]),
                softcap,
                ..case([2, 2, 1], [70, 200], [16, 8])
            },
        ),
    ]
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    all.add("attention parts f32 tiles", parts_are_the_whole);
    let large = AttentionCase::causal([1, 8, 2], [1024, 1024], [256, 256], F32);
    // More items than a GPU has multiprocessors.
    let rounds = AttentionCase::causal([1, 36, 12], [400, 400], [64, 64], F32);
    for (name, case) in all.sizes(&cases(), &[("large", large), ("rounds", rounds)]) {
        for dtype in DTYPES {
            // Tensor cores take rows of whole 16 bytes in 16 bits, and warpgroups several tiles.
            let takes_mma = dtype != F32 && case.widths.iter().all(|width| width % 8 == 0);
            let takes_wgmma = takes_mma && case.bias.is_none() && case.positions[0] > 64 && case.widths[0] <= 128;
            for kernel in AttentionKernel::ALL {
                let takes = match kernel {
                    AttentionKernel::Wgmma => takes_wgmma,
                    AttentionKernel::Mma => takes_mma,
                    AttentionKernel::Tiles => true,
                };
                if takes && kernel.runs_on(all.client) {
                    let case = AttentionCase { dtype, kernel, ..case };
                    all.add(format!("attention {name} {dtype} {}", kernel.name()), |client| check(client, case));
                }
            }
        }
    }
}

/// Attention of one query takes the keys in parts. It equals attention of many copies of the query,
/// which does not, except for rounding in f32.
fn parts_are_the_whole<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    if !has_attention(client) {
        return Ok(0.0);
    }
    let (heads, keys, width) = (4, 700, 24);
    let view = |seed: u64, heads: usize, positions: usize| {
        let handle = upload_f32(client, &normal(heads * positions * width, seed));
        HeadsView { handle, shape: [1, heads, positions, width], strides: [0, positions * width, width, 1], dtype: F32 }
    };
    let run = |copies: usize| -> Result<Vec<f32>, Failure> {
        let mut query = view(1, heads, 1);
        (query.shape[2], query.strides[2]) = (copies, 0);
        let (key, value) = (view(2, 2, keys), view(3, 2, keys));
        let (mask, bias, documents, softcap) = (None, None, None, None);
        let (scale, causal, kernel) = (0.2, false, AttentionKernel::Tiles);
        let inputs = AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, kernel };
        let AttentionOutput { y, lse } = attention_forward(client, &inputs)?;
        // y is `[T, H, e]` and lse `[H, T]`, of the first copy.
        let (y, lse) = (read_f32(client, y)?, read_f32(client, lse)?);
        Ok([&y[..heads * width], &lse.into_iter().step_by(copies).collect::<Vec<_>>()].concat())
    };
    let (parts, whole) = (run(1)?, run(65)?);
    let shares = parts.iter().zip(&whole).map(|(part, whole)| f64::from((part - whole).abs()) / 1e-5);
    let worst = shares.fold(0.0, f64::max);
    if worst <= 1.0 { Ok(worst) } else { Err(Failure::Wrong(format!("{worst} times the allowed difference"))) }
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: AttentionCase) -> Result<f64, Failure> {
    if !supports(client, case.dtype) || !has_attention(client) {
        return Ok(0.0);
    }
    poison(client, &case.output_bytes())?;
    case.run(client, true, 1).map_err(|flaw| match flaw {
        Flaw::Unsupported(error) => Failure::Kernel(error),
        Flaw::Wrong(text) => Failure::Wrong(text),
        Flaw::Refused(text) => Failure::Device(text),
    })
}
