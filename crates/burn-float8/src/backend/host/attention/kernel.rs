//! Attention over f32 slices on all cores. Memory grows with T + S. Results do not depend on the
//! number of threads.
//!
//! ```text
//! S = mask(softcap(scale · q kᵀ)) + bias       P = exp(S - lse)     lse = ln Σ exp S     y = P v
//! D = Σ y ∘ dy       dP = dy vᵀ      dS = P ∘ (dP - D) · scale · softcap'
//! dq = dS k          dk = dSᵀ q      dv = Pᵀ dy
//! ```
//! Forward iterates over tiles of queries by keys with a running maximum and sum (Dao,
//! FlashAttention-2). Backward recomputes P tile by tile. Fully hidden tiles are skipped.

use core::ops::Range;

use rayon::prelude::*;

use super::super::vector::{dot, exp, exp_minus, max, vectorized};
use super::super::view::View;
use super::product::{Keep, Matrix, add_row, multiply};

/// Queries per tile.
pub(super) const QUERIES: usize = 64;
/// Keys per tile: the scores, 128 KiB, stay in a core's cache.
const KEYS: usize = 512;
/// Keys per tile for a single query. The decoded keys and values of a cache then stay in the L1
/// cache, and `malloc` reuses their memory. For larger tiles it maps and returns pages each time.
const KEYS_OF_ONE: usize = 128;
/// Minimum number of tasks in backward, if there are enough tiles. Each task after the first of a
/// key head adds a copy of dk and dv.
const TASKS: usize = 16;

/// Batch size, heads, positions and widths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) dim: usize,
    pub(super) value_dim: usize,
}

impl Sizes {
    /// Maximum number of keys per tile.
    pub(super) fn tile_keys(&self) -> usize {
        let most = if self.queries == 1 { KEYS_OF_ONE } else { KEYS };
        most.min(self.keys)
    }
}

/// Rows of one head, `at` = batch, head and first position.
pub(super) fn matrix<'a>(view: &'a View<'_>, at: [usize; 3]) -> Matrix<'a> {
    Matrix { values: view.from(at), row: view.strides[2], column: 1 }
}

/// Masks and transformations of scores.
pub(super) struct Scores<'a> {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// Whether query `t` sees only keys up to `t + keys - queries`.
    pub(super) is_causal: bool,
    /// True hides a key, with strides by batch, head, query and key. Broadcast axes have stride 0.
    pub(super) mask: Option<(&'a [bool], [usize; 4])>,
    /// Added to scores, with strides of the same axes.
    pub(super) bias: Option<(&'a [f32], [usize; 4])>,
    /// Document of each position, `[batch, keys]`. Queries see only keys of their document. The
    /// numbers of queries and keys are equal.
    pub(super) documents: Option<&'a [i64]>,
}

/// Position of a tile.
#[derive(Clone)]
pub(super) struct Tile {
    batch: usize,
    head: usize,
    queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Tile {
    pub(super) fn of_head(&self, head: usize) -> Self {
        Self { head, ..self.clone() }
    }
}

impl Scores<'_> {
    /// End of the keys that the query may see by causality.
    fn limit(&self, sizes: &Sizes, query: usize) -> usize {
        if self.is_causal { (query + 1 + sizes.keys).saturating_sub(sizes.queries) } else { sizes.keys }
    }

    /// Range from the first to the last key that the mask shows, if all queries of a head share the
    /// mask.
    fn shown(&self, sizes: &Sizes, batch: usize, head: usize) -> Range<usize> {
        let Some((mask, [of_batch, of_head, 0, 1])) = self.mask else { return 0..sizes.keys };
        let mask = &mask[batch * of_batch + head * of_head..][..sizes.keys];
        let is_shown = |hidden: &bool| !*hidden;
        match (mask.iter().position(is_shown), mask.iter().rposition(is_shown)) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Tiles of a head's queries in key order, without fully hidden tiles. They start at the first
    /// visible key, so hidden keys before it do not change the result.
    pub(super) fn tiles(
        &self,
        sizes: &Sizes,
        batch: usize,
        head: usize,
        queries: Range<usize>,
    ) -> impl Iterator<Item = Tile> {
        let shown = self.shown(sizes, batch, head);
        let end = self.limit(sizes, queries.end - 1).min(shown.end);
        let most = sizes.tile_keys();
        (shown.start..end).step_by(most).filter_map(move |start| {
            let keys = start..(start + most).min(end);
            let is_visible = self.documents.is_none_or(|documents| {
                let documents = &documents[batch * sizes.keys..][..sizes.keys];
                let [own, other] = [&documents[queries.clone()], &documents[keys.clone()]].map(|part| {
                    part.iter().fold([i64::MAX, i64::MIN], |[low, high], id| [low.min(*id), high.max(*id)])
                });
                own[0] <= other[1] && other[0] <= own[1]
            });
            is_visible.then(|| Tile { batch, head, queries: queries.clone(), keys })
        })
    }

    /// Turns scaled products q kᵀ of a tile into scores; hidden keys get `-inf`. `slopes` receives
    /// the derivative of softcap.
    #[inline(always)]
    fn finish(&self, sizes: &Sizes, tile: &Tile, scores: &mut [f32], mut slopes: Option<&mut [f32]>) {
        let width = tile.keys.len();
        for (row, (query, scores)) in tile.queries.clone().zip(scores.chunks_exact_mut(width)).enumerate() {
            if let Some(cap) = self.softcap {
                for (i, score) in scores.iter_mut().enumerate() {
                    let tanh = (*score / cap).tanh();
                    *score = cap * tanh;
                    if let Some(slopes) = &mut slopes {
                        slopes[row * width + i] = 1.0 - tanh * tanh;
                    }
                }
            }
            if let Some((mask, [batch, head, of_query, of_key])) = self.mask {
                let start = tile.batch * batch + tile.head * head + query * of_query;
                for (key, score) in tile.keys.clone().zip(&mut *scores) {
                    *score = if mask[start + key * of_key] { f32::NEG_INFINITY } else { *score };
                }
            }
            if let Some(documents) = self.documents {
                let documents = &documents[tile.batch * sizes.keys..][..sizes.keys];
                for (other, score) in documents[tile.keys.clone()].iter().zip(&mut *scores) {
                    *score = if *other == documents[query] { *score } else { f32::NEG_INFINITY };
                }
            }
            let visible = self.limit(sizes, query).saturating_sub(tile.keys.start).min(width);
            scores[visible..].fill(f32::NEG_INFINITY);
            if let Some((bias, [batch, head, of_query, of_key])) = self.bias {
                let start = tile.batch * batch + tile.head * head + query * of_query;
                for (key, score) in tile.keys.clone().zip(scores) {
                    *score += bias[start + key * of_key];
                }
            }
        }
    }
}

/// y `[batch, heads, queries, value_dim]`, and the log-sum-exp of each row,
/// `[batch, heads, queries]`. A query that sees no key has y = 0 and log-sum-exp `-inf`.
pub(super) fn forward(sizes: Sizes, [q, k, v]: [&View<'_>; 3], scores: &Scores<'_>) -> (Vec<f32>, Vec<f32>) {
    let Sizes { heads, queries, value_dim, .. } = sizes;
    let mut y = vec![0.0; sizes.batch * heads * queries * value_dim];
    let mut lse = vec![0.0; sizes.batch * heads * queries];
    let of_heads = y.par_chunks_mut(queries * value_dim).zip(lse.par_chunks_mut(queries)).enumerate();
    let tasks = of_heads.flat_map(|(index, (y, lse))| {
        let blocks = y.par_chunks_mut(QUERIES * value_dim).zip(lse.par_chunks_mut(QUERIES)).enumerate();
        blocks.map(move |(block, (y, lse))| (index / heads, index % heads, block * QUERIES, y, lse))
    });
    tasks.for_each(|(batch, head, start, y, lse)| {
        let rows = lse.len();
        let kv_head = head * sizes.kv_heads / heads;
        let mut tile_scores = vec![0.0; rows * sizes.tile_keys()];
        let mut running = Running::new();
        for tile in scores.tiles(&sizes, batch, head, start..start + rows) {
            let q = matrix(q, [batch, head, start]);
            let [k, v] = [k, v].map(|view| matrix(view, [batch, kv_head, tile.keys.start]));
            running.add(&sizes, scores, &tile, [q, k, v], &mut tile_scores, y);
        }
        running.finish(&sizes, y, Some(lse));
    });
    (y, lse)
}

/// Running maximum and sum of each query of a tile.
pub(super) struct Running {
    maxima: [f32; QUERIES],
    sums: [f32; QUERIES],
}

impl Running {
    pub(super) fn new() -> Self {
        Self { maxima: [f32::NEG_INFINITY; QUERIES], sums: [0.0; QUERIES] }
    }

    /// Adds a tile of keys and values to y, `[queries, value_dim]`. `p` is scratch memory for
    /// scores.
    pub(super) fn add(
        &mut self,
        sizes: &Sizes,
        scores: &Scores<'_>,
        tile: &Tile,
        [q, k, v]: [Matrix<'_>; 3],
        p: &mut [f32],
        y: &mut [f32],
    ) {
        let (rows, width, value_dim) = (tile.queries.len(), tile.keys.len(), sizes.value_dim);
        let p = &mut p[..rows * width];
        multiply(p, width, Keep::Nothing, scores.scale, q, k.transposed(), [rows, width, sizes.dim]);
        vectorized!({
            scores.finish(sizes, tile, p, None);
            let rows = p.chunks_exact_mut(width).zip(y.chunks_exact_mut(value_dim));
            for (((p, y), old_max), sum) in rows.zip(&mut self.maxima).zip(&mut self.sums) {
                let new_max = max(p).max(*old_max);
                if new_max == f32::NEG_INFINITY && !p.iter().any(|score| score.is_nan()) {
                    p.fill(0.0);
                    continue;
                }
                let before = exp(*old_max - new_max);
                *sum = *sum * before + exp_minus(p, new_max);
                y.iter_mut().for_each(|y| *y *= before);
                *old_max = new_max;
            }
        });
        if sizes.queries == 1 {
            vectorized!(add_row(y, p, v));
        } else {
            multiply(y, value_dim, Keep::Sum, 1.0, Matrix::of(p, width), v, [rows, value_dim, width]);
        }
    }

    /// Divides y by the sums. Writes the log-sum-exp to `lse` if given.
    pub(super) fn finish(&self, sizes: &Sizes, y: &mut [f32], mut lse: Option<&mut [f32]>) {
        let rows = y.chunks_exact_mut(sizes.value_dim).zip(self.sums).zip(self.maxima).enumerate();
        for (row, ((y, sum), max)) in rows {
            if let Some(lse) = &mut lse {
                lse[row] = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
            }
            // NaN stays.
            let factor = if sum == 0.0 { 0.0 } else { sum.recip() };
            y.iter_mut().for_each(|y| *y *= factor);
        }
    }
}

/// Outputs of forward, and dy.
pub(super) struct Output<'a> {
    pub(super) y: &'a [f32],
    pub(super) lse: &'a [f32],
    pub(super) dy: View<'a>,
}

/// Gradients of q, k and v in their shapes, one head after another.
pub(super) fn backward(
    sizes: Sizes,
    inputs: [&View<'_>; 3],
    scores: &Scores<'_>,
    output: &Output<'_>,
) -> [Vec<f32>; 3] {
    let Sizes { batch, heads, kv_heads, queries, keys, dim, value_dim } = sizes;
    let group = heads / kv_heads;
    let blocks = queries.div_ceil(QUERIES);
    // The number of parts fixes the order of summation, so it depends only on the shape.
    let parts = TASKS.div_ceil(batch * kv_heads).min(blocks);
    let tasks = (0..batch * kv_heads * parts).into_par_iter();
    let partial: Vec<Gradients> = tasks
        .map(|task| part_of_backward(&sizes, inputs, scores, output, [task / parts, task % parts, parts]))
        .collect();
    let [mut dq, mut dk, mut dv] = [[heads, queries, dim], [kv_heads, keys, dim], [kv_heads, keys, value_dim]]
        .map(|[heads, positions, width]| vec![0.0; batch * heads * positions * width]);
    let of_heads = dk.par_chunks_mut(keys * dim).zip(dv.par_chunks_mut(keys * value_dim));
    let of_heads = of_heads.zip(dq.par_chunks_mut(group * queries * dim)).zip(partial.par_chunks(parts));
    of_heads.for_each(|(((dk, dv), dq), partial)| {
        for (part, gradients) in partial.iter().enumerate() {
            dk.iter_mut().zip(&gradients.dk).for_each(|(sum, term)| *sum += term);
            dv.iter_mut().zip(&gradients.dv).for_each(|(sum, term)| *sum += term);
            let mut rows = &gradients.dq[..];
            for head in dq.chunks_exact_mut(queries * dim) {
                for block in head.chunks_mut(QUERIES * dim).skip(part).step_by(parts) {
                    let (own, rest) = rows.split_at(block.len());
                    block.copy_from_slice(own);
                    rows = rest;
                }
            }
        }
    });
    [dq, dk, dv]
}

/// Contribution of one task to the gradients of a key head.
struct Gradients {
    /// Rows of the part's queries, head by head, block by block.
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Gradients of every `parts`-th block of queries, starting at `part`.
fn part_of_backward(
    sizes: &Sizes,
    [q, k, v]: [&View<'_>; 3],
    scores: &Scores<'_>,
    output: &Output<'_>,
    [of_head, part, parts]: [usize; 3],
) -> Gradients {
    let &Sizes { heads, kv_heads, queries, keys, dim, value_dim, .. } = sizes;
    let (batch, kv_head, group) = (of_head / kv_heads, of_head % kv_heads, heads / kv_heads);
    let (mut dq, mut dk, mut dv) = (vec![], vec![0.0; keys * dim], vec![0.0; keys * value_dim]);
    let [mut p_tile, mut ds_tile] = [(); 2].map(|()| vec![0.0; QUERIES * KEYS]);
    let mut slopes = vec![0.0; if scores.softcap.is_some() { QUERIES * KEYS } else { 0 }];
    for head in kv_head * group..(kv_head + 1) * group {
        for start in (part * QUERIES..queries).step_by(parts * QUERIES) {
            let rows = QUERIES.min(queries - start);
            let first = (batch * heads + head) * queries + start;
            let (q, dy) = (matrix(q, [batch, head, start]), matrix(&output.dy, [batch, head, start]));
            let lse = &output.lse[first..][..rows];
            let y = &output.y[first * value_dim..][..rows * value_dim];
            let mut deltas = [0.0; QUERIES];
            for (row, (delta, y)) in deltas.iter_mut().zip(y.chunks_exact(value_dim)).enumerate() {
                *delta = dot(y, &dy.values[row * dy.row..][..value_dim]);
            }
            let filled = dq.len();
            dq.resize(filled + rows * dim, 0.0);
            for tile in scores.tiles(sizes, batch, head, start..start + rows) {
                let (width, first) = (tile.keys.len(), tile.keys.start);
                let (k, v) = (matrix(k, [batch, kv_head, first]), matrix(v, [batch, kv_head, first]));
                let (p, ds) = (&mut p_tile[..rows * width], &mut ds_tile[..rows * width]);
                multiply(p, width, Keep::Nothing, scores.scale, q, k.transposed(), [rows, width, dim]);
                multiply(ds, width, Keep::Nothing, 1.0, dy, v.transposed(), [rows, width, value_dim]);
                vectorized!({
                    let slopes = scores.softcap.map(|_| &mut slopes[..rows * width]);
                    scores.finish(sizes, &tile, p, slopes);
                    for (row, (p, ds)) in p.chunks_exact_mut(width).zip(ds.chunks_exact_mut(width)).enumerate() {
                        if lse[row] == f32::NEG_INFINITY {
                            p.fill(0.0);
                            ds.fill(0.0);
                            continue;
                        }
                        for (p, ds) in p.iter_mut().zip(ds) {
                            *p = exp(*p - lse[row]);
                            *ds = *p * (*ds - deltas[row]) * scores.scale;
                        }
                    }
                });
                if scores.softcap.is_some() {
                    ds.iter_mut().zip(&slopes).for_each(|(ds, slope)| *ds *= slope);
                }
                let (p, ds) = (Matrix::of(p, width), Matrix::of(ds, width));
                multiply(
                    &mut dv[first * value_dim..],
                    value_dim,
                    Keep::Sum,
                    1.0,
                    p.transposed(),
                    dy,
                    [width, value_dim, rows],
                );
                multiply(&mut dk[first * dim..], dim, Keep::Sum, 1.0, ds.transposed(), q, [width, dim, rows]);
                multiply(&mut dq[filled..], dim, Keep::Sum, 1.0, ds, k, [rows, dim, width]);
            }
        }
    }
    Gradients { dq, dk, dv }
}
