//! Forward of few queries and many keys: packed query heads, parts of the keys, and the kernel that
//! combines the parts.
//!
//! ```text
//! part p of the keys: y_p and lse_p in f32        lse = ln Σ exp lse_p        y = Σ exp(lse_p - lse) y_p
//! ```
//! With one query, the query heads of a key head are rows of one tile, which reads its keys once.
//! Source: Dao et al., *Flash-Decoding for long-context inference* (2023).

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{AttentionInputs, AttentionOutput, HIDDEN, HeadsView, NOTHING, TILE};
use crate::element_type::ElementType;
use crate::grid::{UNITS, cube_first, fold};
use crate::version::Version;

/// Fewest keys of a part.
const PART: usize = 256;

/// Multiprocessors of a device that does not report them.
const SMS: u32 = 16;

/// Inputs whose forward takes the keys in parts.
pub(super) struct Parted {
    /// With one query, its heads are rows: `[B, KV, H / KV, ..]`.
    pub(super) inputs: AttentionInputs,
    pub(super) parts: usize,
}

/// Inputs of at most a tile of queries, with keys for two parts. None for others.
pub(super) fn parted<R: Runtime>(client: &ComputeClient<R>, inputs: &AttentionInputs) -> Option<Parted> {
    let ([batch, heads, queries, _], [_, kv_heads, keys, _]) = (inputs.query.shape, inputs.key.shape);
    let is_grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads / kv_heads <= TILE as usize;
    if queries > TILE as usize || keys < 2 * PART || inputs.documents.is_some() || !is_grouped {
        return None;
    }
    let mut inputs = inputs.clone();
    if queries == 1 {
        inputs.query = grouped(&inputs.query, kv_heads);
        for spread in [&mut inputs.mask, &mut inputs.bias].into_iter().flatten() {
            match spread.shape {
                [_, 1, 1, _] => {}
                [_, of_heads, 1, _] if of_heads == heads => *spread = grouped(spread, kv_heads),
                // An error without parts.
                _ => return None,
            }
        }
        // The last query sees all keys.
        inputs.causal = false;
    }
    // Two cubes per multiprocessor.
    let cubes = 2 * client.properties().hardware.num_streaming_multiprocessors.unwrap_or(SMS) as usize;
    let parts = (cubes / (batch * inputs.query.shape[1]).max(1)).clamp(1, keys / PART);
    (queries == 1 || parts > 1).then_some(Parted { inputs, parts })
}

/// `[B, H, 1, ..]` as `[B, groups, H / groups, ..]`.
fn grouped(view: &HeadsView, groups: usize) -> HeadsView {
    let ([batch, heads, _, width], [of_batch, of_head, _, of_col]) = (view.shape, view.strides);
    let each = heads / groups;
    let strides = [of_batch, each * of_head, of_head, of_col];
    HeadsView { shape: [batch, groups, each, width], strides, ..view.clone() }
}

/// Results of attention of `inputs` from the results of its parts: y f32 `[parts, B, H, T, e]` and lse
/// `[parts, B, H, T]`.
pub(super) fn combine<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &AttentionInputs,
    element_type: ElementType,
    parts: usize,
    of_parts: &AttentionOutput,
) -> AttentionOutput {
    let ([batch, heads, queries, _], [.., width]) = (inputs.query.shape, inputs.value.shape);
    let rows = batch * heads * queries;
    let empty = |len: usize, size: usize| client.empty(len * size);
    let output = AttentionOutput { y: empty(rows * width, element_type.size()), lse: empty(rows, size_of::<f32>()) };
    // SAFETY: the results of parts and of all keys have these lengths, and units past the end exit.
    unsafe {
        attention_combine::launch_unchecked::<R>(
            client,
            fold(client, (rows * width).div_ceil(UNITS as usize) as u32),
            CubeDim::new_1d(UNITS),
            ArrayArg::from_raw_parts(of_parts.y.clone(), parts * rows * width),
            ArrayArg::from_raw_parts(of_parts.lse.clone(), parts * rows),
            ArrayArg::from_raw_parts(output.y.clone(), rows * width),
            ArrayArg::from_raw_parts(output.lse.clone(), rows),
            heads as u32,
            queries as u32,
            width as u32,
            element_type.storage(),
            Version::of(client),
        );
    }
    output
}

/// One unit per element of y.
#[cube(launch_unchecked)]
fn attention_combine<O: Float>(
    of_parts: &Array<f32>,
    lse_of_parts: &Array<f32>,
    y: &mut Array<O>,
    lse: &mut Array<f32>,
    heads: u32,
    queries: u32,
    width: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let number = cube_first(UNITS) + UNIT_POS;
    if number >= y.len() as u32 {
        terminate!();
    }
    let (row, col) = (number / width, number % width);
    let (rows, end) = (lse.len() as u32, lse_of_parts.len() as u32);
    let mut largest = NOTHING.runtime();
    let mut at = row;
    while at < end {
        largest = max(largest, lse_of_parts[at as usize]);
        at += rows;
    }
    let (mut total, mut sum) = (0.0f32.runtime(), 0.0f32.runtime());
    at = row;
    while at < end {
        let weight = (lse_of_parts[at as usize] - largest).exp();
        total += weight;
        sum = fma(weight, of_parts[(at * width + col) as usize], sum);
        at += rows;
    }
    let (head, query) = (row / queries, row % queries);
    let place = (head / heads * queries + query) * heads + head % heads;
    y[(place * width + col) as usize] = O::cast_from(select(total == 0.0, 0.0f32, sum / total));
    if col == 0 {
        lse[row as usize] = select(total == 0.0, HIDDEN, largest + total.ln());
    }
}
