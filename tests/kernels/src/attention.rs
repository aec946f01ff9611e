//! Attention's kernels against the definition in f64, element by element.

use cubecl::prelude::*;
use float8_kernels::attention::{AttentionKernel, has_attention};
use float8_kernels::check::{AttentionCase, Flaw, MASK_BYTES, MASK_WORDS};
use float8_kernels::supports;

use crate::Failure;
use crate::case::Cases;
use crate::data::{DTYPES, F32};
use crate::device::poison;

/// One row, ragged and whole tiles, more keys than queries and fewer, grouped heads, several slices,
/// keys in parts, and each mode. Cases with the same modes run the same kernels.
fn cases() -> Vec<(&'static str, AttentionCase)> {
    let case = |heads, positions, widths| AttentionCase::causal(heads, positions, widths, F32);
    // A mask and a bias with axes of size 1, and softcap.
    let of_keys = |mask, case| AttentionCase {
        mask: Some(([false, true, true, false], mask)),
        bias: Some([true, false, false, false]),
        softcap: Some(1.5),
        ..case
    };
    let by_words = AttentionCase { mask: Some(([false; 4], MASK_WORDS)), ..case([2, 2, 2], [150, 200], [16, 16]) };
    vec![
        ("one", case([1, 1, 1], [1, 1], [1, 1])),
        ("odd", case([1, 2, 2], [65, 65], [5, 7])),
        ("one_query", case([2, 4, 2], [1, 130], [16, 16])),
        ("few", case([2, 8, 2], [1, 700], [64, 64])),
        ("few_masked", of_keys(MASK_WORDS, case([2, 4, 2], [1, 600], [16, 8]))),
        ("several", AttentionCase { mask: Some(([false; 4], MASK_BYTES)), ..case([1, 2, 1], [5, 600], [24, 72]) }),
        ("grouped", case([1, 4, 2], [200, 200], [64, 64])),
        ("more_keys", case([1, 2, 1], [70, 300], [24, 24])),
        ("more_queries", case([1, 2, 1], [150, 20], [8, 24])),
        ("strided", AttentionCase { strided: true, ..case([2, 4, 2], [130, 130], [32, 16]) }),
        ("wide", case([1, 2, 1], [70, 90], [128, 96])),
        ("documents", AttentionCase { documents: true, ..case([2, 2, 1], [260, 260], [16, 16]) }),
        ("mask", AttentionCase { causal: false, ..by_words }),
        ("mask_of_keys", of_keys(MASK_BYTES, case([2, 2, 1], [70, 200], [16, 8]))),
    ]
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
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
