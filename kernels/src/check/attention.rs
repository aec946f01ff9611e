//! [`AttentionCase`]: attention on generated inputs, compared with its definition element by element.

use core::fmt;

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;

use super::{Flaw, floats, in_dtype, read, split_mix};
use crate::attention::{
    AttentionInputs, AttentionKernel, AttentionVariant, HeadsView, Kind, attention_backward, attention_forward,
};
use crate::element_type::ElementType;
use crate::reference::attention::{Bounded, HostAttention, attention};

/// Axes of a mask or bias `[B, H, T, S]` that have size 1.
pub type Broadcast = [bool; 4];

/// Sizes and modes of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    /// B, H and KV.
    pub heads: [usize; 3],
    /// T and S.
    pub positions: [usize; 2],
    /// d and e.
    pub widths: [usize; 2],
    /// Dtype of q, k, v, dy and the bias.
    pub dtype: StorageType,
    /// Whether the mask is causal.
    pub causal: bool,
    /// Softcap, if any.
    pub softcap: Option<f32>,
    /// A mask of bytes or words that hides about half of the keys, all keys of some queries, and
    /// whole tiles.
    pub mask: Option<(Broadcast, StorageType)>,
    /// A bias.
    pub bias: Option<Broadcast>,
    /// Whether there are three documents. The first and the last have the same id.
    pub documents: bool,
    /// Whether q, k, v and dy are views of `[B, positions, heads, width]`.
    pub strided: bool,
    /// As in [`AttentionInputs`].
    pub kernel: AttentionKernel,
}

/// dtype of a mask with a bool per byte.
pub const MASK_BYTES: StorageType = StorageType::Scalar(ElemType::UInt(UIntKind::U8));
/// dtype of a mask with a bool per word.
pub const MASK_WORDS: StorageType = StorageType::Scalar(ElemType::UInt(UIntKind::U32));

fn hides([b, h, t, s]: [usize; 4]) -> bool {
    (t * 7 + s * 5 + b + h).is_multiple_of(3) || t % 50 == 3 || (64..128).contains(&s)
}

fn document(batch: usize, position: usize, positions: usize) -> i32 {
    [0, 1, 0][(3 * position / positions + batch) % 3]
}

/// `change(axis, element)` for each axis.
fn each(shape: [usize; 4], change: impl Fn(usize, usize) -> usize) -> [usize; 4] {
    core::array::from_fn(|axis| change(axis, shape[axis]))
}

fn places(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [_, b, c, d] = shape;
    (0..shape.iter().product()).map(move |i| [i / (b * c * d), i / (c * d) % b, i / d % c, i % d])
}

fn dense([_, b, c, d]: [usize; 4]) -> [usize; 4] {
    [b * c * d, c * d, d, 1]
}

fn index(at: [usize; 4], strides: [usize; 4]) -> usize {
    at.iter().zip(strides).map(|(place, stride)| place * stride).sum()
}

impl AttentionCase {
    /// Causal, with nothing else.
    pub const fn causal(heads: [usize; 3], positions: [usize; 2], widths: [usize; 2], dtype: StorageType) -> Self {
        let (softcap, mask, bias, documents, strided) = (None, None, None, false, false);
        let (causal, kernel) = (true, AttentionKernel::Wgmma);
        Self { heads, positions, widths, dtype, causal, softcap, mask, bias, documents, strided, kernel }
    }

    /// Shapes of q, k, v and dy.
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { heads: [batch, heads, kv_heads], positions: [queries, keys], widths: [dim, width], .. } = *self;
        [
            [batch, heads, queries, dim],
            [batch, kv_heads, keys, dim],
            [batch, kv_heads, keys, width],
            [batch, heads, queries, width],
        ]
    }

    /// Bytes of y, lse, dq, dk and dv.
    #[must_use]
    pub fn output_bytes(&self) -> [usize; 5] {
        let [q, k, v, y] = self.shapes().map(|shape| shape.iter().product::<usize>());
        let size = self.dtype.size();
        [y * size, y / self.widths[1] * 4, q * size, k * size, v * size]
    }

    /// Runs forward, and with `backward` the gradients. Returns the largest error as a share of the
    /// allowed one.
    ///
    /// # Errors
    /// The first element whose error is larger than its bound, or the device's error.
    pub fn run<R: Runtime>(&self, client: &ComputeClient<R>, backward: bool, seed: u64) -> Result<f64, Flaw> {
        let Self { heads: [batch, ..], positions: [queries, keys], dtype, .. } = *self;
        let mut number = seed << 8;
        let mut upload = |shape: [usize; 4], strided: bool| -> Result<(HeadsView, Vec<f32>), Flaw> {
            number += 1;
            let value = |i| (split_mix(number, i as u64) >> 40) as f32 / (1 << 22) as f32 - 2.0;
            let (bytes, values) = in_dtype(&(0..shape.iter().product()).map(value).collect::<Vec<_>>(), dtype)?;
            let [_, heads, positions, width] = shape;
            let swapped = [heads * positions * width, width, heads * width, 1];
            let strides = if strided { swapped } else { dense(shape) };
            let values = places(shape).map(|at| values[index(at, strides)]).collect();
            Ok((HeadsView { handle: client.create_from_slice(&bytes), shape, strides, dtype }, values))
        };
        let [q, k, v, grad] = self.shapes().map(|shape| upload(shape, self.strided));
        let ((query, q), (key, k), (value, v), (grad, dy)) = (q?, k?, v?, grad?);
        let scores = [batch, self.heads[1], queries, keys];
        let own =
            |at: [usize; 4], broadcast: Broadcast| each(at, |axis, place| if broadcast[axis] { 0 } else { place });
        let shape_of = |broadcast: Broadcast| each(scores, |axis, size| if broadcast[axis] { 1 } else { size });
        let is_hidden = |at @ [b, _, t, s]: [usize; 4]| {
            self.causal && s + queries > t + keys
                || self.mask.is_some_and(|(broadcast, _)| hides(own(at, broadcast)))
                || self.documents && document(b, t, keys) != document(b, s, keys)
        };
        let mask = self.mask.map(|(broadcast, dtype)| {
            let shape = shape_of(broadcast);
            let bytes = places(shape).flat_map(|at| {
                let word = u32::from(hides(at)).to_le_bytes();
                word.into_iter().take(dtype.size())
            });
            let handle = client.create_from_slice(&bytes.collect::<Vec<_>>());
            HeadsView { handle, shape, strides: dense(shape), dtype }
        });
        let bias = self.bias.map(|broadcast| upload(shape_of(broadcast), false)).transpose()?;
        let added = bias.iter().flat_map(|(view, values)| {
            let broadcast = self.bias.expect("there is a bias");
            places(scores).map(move |at| values[index(own(at, broadcast), view.strides)])
        });
        let added: Vec<f32> = added.collect();
        let documents = self.documents.then(|| {
            let ids = (0..batch * keys).map(|i| document(i / keys, i % keys, keys));
            client.create_from_slice(&ids.flat_map(i32::to_le_bytes).collect::<Vec<_>>())
        });
        let scale = (self.widths[0] as f32).sqrt().recip();
        let want = attention(&HostAttention {
            query: &q,
            key: &k,
            value: &v,
            dy: &dy,
            heads: self.heads,
            positions: self.positions,
            widths: self.widths,
            hidden: &places(scores).map(is_hidden).collect::<Vec<_>>(),
            bias: &added,
            scale: scale.into(),
            softcap: self.softcap.map(f64::from),
            rounding: ElementType::of(dtype)?.rounding(),
        });
        let (bias, softcap) = (bias.map(|(view, _)| view), self.softcap);
        let Self { causal, kernel, .. } = *self;
        let inputs = AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, kernel };
        let output = attention_forward(client, &inputs)?;
        let [_, heads, _, width] = grad.shape;
        let strides = [heads * queries * width, width, heads * width, 1];
        let y = HeadsView { handle: output.y.clone(), strides, ..grad.clone() };
        let mut handles = vec![("y", output.y, dtype), ("lse", output.lse.clone(), ElementType::F32.storage())];
        if backward {
            let gradients = attention_backward(client, &inputs, &y, &output.lse, &grad)?;
            handles.extend(["dq", "dk", "dv"].into_iter().zip(gradients).map(|(name, made)| (name, made, dtype)));
        }
        let mut worst = 0f64;
        for ((name, handle, dtype), want) in handles.into_iter().zip(&want) {
            let mut got = floats(&read(client, &[&handle])?[0], dtype)?;
            if name == "y" {
                got = places(grad.shape).map(|at| got[index(at, strides)]).collect();
            }
            worst = worst.max(compare(name, &got, want)?);
        }
        Ok(worst)
    }
}

fn compare(what: &str, got: &[f32], want: &Bounded) -> Result<f64, Flaw> {
    if got.len() != want.values.len() {
        return Err(Flaw::Wrong(format!("{what} has {} elements, not {}", got.len(), want.values.len())));
    }
    let (at, share) = want.worst(got);
    if share <= 1.0 {
        return Ok(share);
    }
    let (value, bound) = (want.values[at], want.bounds[at]);
    Err(Flaw::Wrong(format!("{what}[{at}] is {:e}, not {value:e} within {bound:e}", got[at])))
}

impl AttentionVariant {
    /// A case with the same compile-time parameters: two key heads, ragged tiles, and several
    /// queries per key head.
    fn case(&self) -> AttentionCase {
        let config = self.config;
        let kind = |kind| if kind == Kind::Byte { MASK_BYTES } else { MASK_WORDS };
        // Cubes of `wgmma` have up to 128 rows, and three stages of 128 columns or four of 64. Cubes
        // of `mma` have up to 128 rows and 64 columns.
        let positions = match self.kernel {
            AttentionKernel::Wgmma => 400,
            AttentionKernel::Mma => 200,
            AttentionKernel::Tiles => 90,
        };
        // An odd width has no vector loads.
        let widths = config.slices.map(|slices| 64 * slices as usize - usize::from(config.words == 1));
        // Two parts. One query sees every key.
        let positions = if self.parted { [1 + usize::from(config.causal), 600] } else { [positions; 2] };
        AttentionCase {
            causal: config.causal,
            softcap: config.softcap.then_some(1.5),
            mask: config.mask.map(|mask| ([true, false, false, false], kind(mask))),
            bias: config.bias.map(|_| [true, false, false, false]),
            documents: config.documents,
            kernel: self.kernel,
            ..AttentionCase::causal([1, 4, 2], positions, widths, config.element_type.storage())
        }
    }

    pub(super) fn judge<R: Runtime>(&self, client: &ComputeClient<R>, seed: u64) -> Result<(), Flaw> {
        self.case().run(client, self.backward, seed).map(|_| ())
    }
}

impl fmt::Display for AttentionVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttentionCase { widths: [dim, width], dtype, .. } = self.case();
        let what = match self {
            Self { backward: true, .. } => " backward",
            Self { parted: true, .. } => " of few queries",
            _ => "",
        };
        write!(f, "attention{what} by {} of heads of {dim} and {width} in {dtype}", self.kernel.name())
    }
}
