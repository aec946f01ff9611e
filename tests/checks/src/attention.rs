//! Attention's kernels against the definition in f64, element by element.

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;
use float8_kernels::attention::{AttentionInputs, HeadsView, attention_backward, attention_forward, has_attention};
use float8_kernels::check::{floats, in_dtype};
use float8_kernels::reference::attention::{Bounded, HostAttention, attention};
use test_data::normal;

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{BF16, F16, F32};
use crate::device::{poison, read};

/// What a case of attention has, apart from q, k and v.
#[derive(Clone, Copy, Debug, Default)]
struct Modes {
    causal: bool,
    softcap: Option<f32>,
    /// Axes that the mask, and the bias, broadcast: batch, heads, queries, keys.
    mask: Option<[bool; 4]>,
    bias: Option<[bool; 4]>,
    documents: bool,
    /// Whether q, k, v and dy are views of `[B, positions, heads, width]`.
    strided: bool,
}

#[derive(Clone, Copy, Debug)]
struct Attention {
    /// B, H and KV.
    heads: [usize; 3],
    /// T and S.
    positions: [usize; 2],
    /// d and e.
    widths: [usize; 2],
    modes: Modes,
}

const CAUSAL: Modes =
    Modes { causal: true, softcap: None, mask: None, bias: None, documents: false, strided: false };
const FULL: Modes = Modes { causal: false, ..CAUSAL };

/// One row, ragged tiles, whole tiles, more keys than queries and fewer, grouped heads, several
/// slices, and each mode.
const CASES: [(&str, Attention); 14] = [
    ("one", Attention { heads: [1, 1, 1], positions: [1, 1], widths: [1, 1], modes: CAUSAL }),
    ("one_query", Attention { heads: [2, 4, 2], positions: [1, 130], widths: [16, 16], modes: CAUSAL }),
    ("whole", Attention { heads: [1, 2, 2], positions: [128, 128], widths: [64, 64], modes: FULL }),
    ("causal", Attention { heads: [1, 4, 2], positions: [200, 200], widths: [64, 64], modes: CAUSAL }),
    ("more_keys", Attention { heads: [1, 2, 1], positions: [70, 300], widths: [24, 24], modes: CAUSAL }),
    ("more_queries", Attention { heads: [1, 2, 1], positions: [150, 20], widths: [8, 24], modes: CAUSAL }),
    ("wide", Attention { heads: [1, 2, 1], positions: [70, 90], widths: [128, 96], modes: CAUSAL }),
    ("odd", Attention { heads: [1, 2, 2], positions: [65, 65], widths: [5, 7], modes: CAUSAL }),
    (
        "documents",
        Attention {
            heads: [2, 2, 1],
            positions: [260, 260],
            widths: [16, 16],
            modes: Modes { documents: true, ..CAUSAL },
        },
    ),
    (
        "mask",
        Attention {
            heads: [2, 2, 2],
            positions: [150, 200],
            widths: [16, 16],
            modes: Modes { mask: Some([false; 4]), ..FULL },
        },
    ),
    (
        "mask_of_keys",
        Attention {
            heads: [2, 2, 1],
            positions: [70, 200],
            widths: [16, 8],
            modes: Modes { mask: Some([false, true, true, false]), ..CAUSAL },
        },
    ),
    (
        "softcap",
        Attention {
            heads: [1, 2, 1],
            positions: [90, 90],
            widths: [16, 16],
            modes: Modes { softcap: Some(1.5), ..FULL },
        },
    ),
    (
        "bias",
        Attention {
            heads: [2, 2, 1],
            positions: [70, 90],
            widths: [16, 16],
            modes: Modes { bias: Some([true, false, false, false]), softcap: Some(2.0), ..CAUSAL },
        },
    ),
    (
        "strided",
        Attention {
            heads: [2, 4, 2],
            positions: [130, 130],
            widths: [32, 16],
            modes: Modes { strided: true, ..CAUSAL },
        },
    ),
];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    let large = Attention { heads: [1, 8, 2], positions: [1024, 1024], widths: [256, 256], modes: CAUSAL };
    for (name, case) in all.sizes(&CASES, &[("large", large)]) {
        for dtype in [F32, F16, BF16] {
            all.add(format!("attention {name} {dtype}"), |client| check(client, case, dtype));
        }
    }
}

/// Whether the mask hides the element: about a third of the keys, all keys of some queries, and
/// whole tiles.
fn hides([b, h, t, s]: [usize; 4]) -> bool {
    (t * 7 + s * 5 + b + h).is_multiple_of(3) || t % 50 == 3 || (64..128).contains(&s)
}

/// Document of a position: three runs, the third with the number of the first.
fn document(batch: usize, position: usize, positions: usize) -> i32 {
    [0, 1, 0][(3 * position / positions + batch) % 3]
}

/// Index of `at` in a tensor whose `broadcast` axes have size 1.
fn spread_shape(shape: [usize; 4], broadcast: [bool; 4]) -> [usize; 4] {
    let mut sizes = shape.iter().zip(broadcast).map(|(&size, one)| if one { 1 } else { size });
    [(); 4].map(|()| sizes.next().expect("four axes"))
}

fn places(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [_, b, c, d] = shape;
    (0..shape.iter().product()).map(move |i| [i / (b * c * d), i / (c * d) % b, i / d % c, i % d])
}

fn dense(shape: [usize; 4]) -> [usize; 4] {
    let [_, b, c, d] = shape;
    [b * c * d, c * d, d, 1]
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: Attention, dtype: StorageType) -> Result<f64, Failure> {
    let Attention { heads: [batch, heads, kv_heads], positions: [queries, keys], widths: [dim, width], modes } = case;
    if !has_attention(client, dtype, case.widths) {
        return Ok(0.0);
    }
    let heads_of = |shape: [usize; 4], seed: u64| -> Result<(HeadsView, Vec<f32>), Failure> {
        let values = normal(shape.iter().product(), seed);
        let [b, h, p, w] = shape;
        let (own, strides) = if modes.strided { ([b, p, h, w], [p * h * w, w, h * w, 1]) } else { (shape, dense(shape)) };
        let (bytes, values) = in_dtype(&values, dtype)?;
        let handle = client.create_from_slice(&bytes);
        let logical = match modes.strided {
            true => places(shape).map(|[i, j, k, l]| values[dense(own)[0] * i + k * h * w + j * w + l]).collect(),
            false => values,
        };
        Ok((HeadsView { handle, shape, strides, dtype }, logical))
    };
    let (query, q) = heads_of([batch, heads, queries, dim], 1)?;
    let (key, k) = heads_of([batch, kv_heads, keys, dim], 2)?;
    let (value, v) = heads_of([batch, kv_heads, keys, width], 3)?;
    let (grad, dy) = heads_of([batch, heads, queries, width], 4)?;

    let scores = [batch, heads, queries, keys];
    let own = |at: [usize; 4], broadcast: [bool; 4]| {
        let mut axes = at.into_iter().zip(broadcast).map(|(place, one)| if one { 0 } else { place });
        [(); 4].map(|()| axes.next().expect("four axes"))
    };
    let hidden: Vec<bool> = places(scores)
        .map(|at @ [b, _, t, s]| {
            modes.causal && s + queries > t + keys
                || modes.mask.is_some_and(|broadcast| hides(own(at, broadcast)))
                || modes.documents && document(b, t, keys) != document(b, s, keys)
        })
        .collect();
    let mask = modes.mask.map(|broadcast| {
        let shape = spread_shape(scores, broadcast);
        let words: Vec<u32> = places(shape).map(|at| u32::from(hides(at))).collect();
        let dtype = StorageType::Scalar(ElemType::UInt(UIntKind::U32));
        HeadsView { handle: client.create_from_slice(u32::as_bytes(&words)), shape, strides: dense(shape), dtype }
    });
    let mut bias_values = vec![];
    let bias = match modes.bias {
        None => None,
        Some(broadcast) => {
            let shape = spread_shape(scores, broadcast);
            let (bytes, values) = in_dtype(&normal(shape.iter().product(), 9), dtype)?;
            let strides = dense(shape);
            let at = |[a, b, c, d]: [usize; 4]| a * strides[0] + b * strides[1] + c * strides[2] + d;
            bias_values = places(scores).map(|place| values[at(own(place, broadcast))]).collect();
            Some(HeadsView { handle: client.create_from_slice(&bytes), shape, strides, dtype })
        }
    };
    let documents = modes.documents.then(|| {
        let ids: Vec<i32> = (0..batch * keys).map(|i| document(i / keys, i % keys, keys)).collect();
        client.create_from_slice(i32::as_bytes(&ids))
    });
    let scale = (dim as f32).sqrt().recip();
    let inputs = AttentionInputs {
        query,
        key,
        value,
        mask,
        bias,
        documents,
        scale,
        softcap: modes.softcap,
        causal: modes.causal,
    };
    let want = attention(&HostAttention {
        query: &q,
        key: &k,
        value: &v,
        dy: &dy,
        heads: case.heads,
        positions: case.positions,
        widths: case.widths,
        hidden: &hidden,
        bias: &bias_values,
        scale: scale.into(),
        softcap: modes.softcap.map(f64::from),
        rounding: 2f64.powi(if dtype == F32 { -24 } else if dtype == F16 { -11 } else { -8 }),
    });

    let bytes = |elements: usize| elements * dtype.size();
    poison(client, &[bytes(dy.len()), 4 * batch * heads * queries, bytes(q.len()), bytes(k.len()), bytes(v.len())])?;
    let output = attention_forward(client, &inputs)?;
    let [_, h, t, w] = grad.shape;
    let y_view = HeadsView { handle: output.y.clone(), strides: [t * h * w, w, h * w, 1], ..grad.clone() };
    let [dq, dk, dv] = attention_backward(client, &inputs, &y_view, &output.lse, &grad)?;
    let y = floats(&read(client, output.y)?, dtype)?;
    let y: Vec<f32> = places(grad.shape).map(|[b, i, p, c]| y[((b * t + p) * h + i) * w + c]).collect();
    let lse = floats(&read(client, output.lse)?, F32)?;
    let mut worst = compare("y", &y, &want[0])?.max(compare("lse", &lse, &want[1])?);
    for ((name, gradient), want) in ["dq", "dk", "dv"].into_iter().zip([dq, dk, dv]).zip(&want[2..]) {
        worst = worst.max(compare(name, &floats(&read(client, gradient)?, dtype)?, want)?);
    }
    Ok(worst)
}

fn compare(what: &str, got: &[f32], want: &Bounded) -> Result<f64, Failure> {
    if got.len() != want.values.len() {
        return Err(wrong!("{what}: {} elements, not {}", got.len(), want.values.len()));
    }
    let (at, share) = want.worst(got);
    if share > 1.0 {
        let (value, bound) = (want.values[at], want.bounds[at]);
        return Err(wrong!("{what}[{at}] is {:e}, not {value:e} within {bound:e}", got[at]));
    }
    Ok(share)
}
