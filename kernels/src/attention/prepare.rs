//! Kernels that run before attention: classes of tiles, and statistics of rows for backward.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::problem::{
    CLASS_HIDDEN, CLASS_MIXED, CLASS_WHOLE, Classes, Heads, HeadsGeometry, Scores, ScoresLaunch, Spread,
};
use super::{CheckedHeads, HIDDEN, NOTHING, TILE};
use crate::element_type::ElementType;
use crate::grid::{UNITS, fold, lanes_sum};
use crate::load::{element, load_vector};
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::words::words;

/// Units of a row of y.
const LANES: u32 = 32;

/// Classes of all tiles, or none without a mask and documents.
pub(super) fn tile_classes<R: Runtime>(client: &ComputeClient<R>, problem: &CheckedHeads) -> Option<Classes> {
    if !problem.config.has_classes() {
        return None;
    }
    let ([batch, ..], [.., queries, _], [.., keys, _]) =
        (problem.query.shape(), problem.query.shape(), problem.key.shape());
    let mut own = problem.mask.as_ref().map_or([1; 2], Spread::own);
    if problem.documents.is_some() {
        own[0] = batch;
    }
    let tiles = [queries, keys].map(|positions| positions.div_ceil(TILE as usize));
    let count = own.iter().chain(&tiles).product::<usize>();
    let classes = Classes { handle: words(client, count), own, tiles };
    // SAFETY: each of `count` cubes writes one class, and positions past the end are not read.
    unsafe {
        classify::launch_unchecked::<R>(
            client,
            fold(client, count as u32),
            CubeDim::new_1d(UNITS),
            ScoresLaunch::of(problem, None),
            ArrayArg::from_raw_parts(classes.handle.clone(), count),
            own[1] as u32,
            tiles[0] as u32,
            tiles[1] as u32,
            Isa::of(client),
            Version::of(client),
        );
    }
    Some(classes)
}

/// One cube per tile. A unit looks at a sixteenth of the keys of four queries.
#[cube(launch_unchecked)]
fn classify(
    scores: &Scores,
    classes: &mut Array<u32>,
    heads: u32,
    query_tiles: u32,
    key_tiles: u32,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let number = CUBE_POS as u32;
    if number >= classes.len() as u32 {
        terminate!();
    }
    let (outer, tile) = (number / (query_tiles * key_tiles), number % (query_tiles * key_tiles));
    let (batch, head) = (outer / heads, outer % heads);
    let (query0, key0) = (tile / key_tiles * TILE, tile % key_tiles * TILE);
    let mut masked = 0u32.runtime();
    let mut i = UNIT_POS;
    while i < comptime!(TILE * TILE) {
        masked += select(scores.is_masked(batch, head, query0 + i / TILE, key0 + i % TILE), 1u32, 0u32);
        i += UNITS;
    }
    // Exact: at most 4096.
    let masked = lanes_sum(f32::cast_from(masked), UNITS, isa);
    if UNIT_POS == 0 {
        let partly = select(masked == 0.0, CLASS_WHOLE, CLASS_MIXED);
        classes[number as usize] = select(masked == comptime!((TILE * TILE) as f32), CLASS_HIDDEN, partly);
    }
}

/// Statistics of a head: enough for any 128 from the first query of a tile on.
#[cube]
pub(super) fn padded(queries: u32) -> u32 {
    (queries.div_ceil(TILE) + 1) * TILE
}

/// Statistics of rows for backward, f32 `[2, B, H, T]` with [`padded`] T: lse, or 1e30 past T and for a
/// query that sees no key, so that its weights are 0; then δ = Σ y ∘ dy.
pub(super) fn row_stats<R: Runtime>(client: &ComputeClient<R>, y: &Heads, dy: &Heads, lse: &Handle) -> Handle {
    let [batch, heads, queries, _] = y.shape();
    let rows = batch * heads * padded(queries as u32) as usize;
    let stats = words(client, 2 * rows);
    let each = UNITS / LANES;
    // SAFETY: the views are checked, lse has a value per row, and rows past the end exit.
    unsafe {
        stats_of_rows::launch_unchecked::<R>(
            client,
            fold(client, (rows as u32).div_ceil(each)),
            CubeDim::new_1d(UNITS),
            y.vector_words().min(dy.vector_words()),
            y.array(),
            dy.array(),
            y.geometry(),
            dy.geometry(),
            ArrayArg::from_raw_parts(lse.clone(), batch * heads * queries),
            ArrayArg::from_raw_parts(stats.clone(), 2 * rows),
            heads as u32,
            queries as u32,
            y.element_type,
            Isa::of(client),
            Version::of(client),
        );
    }
    stats
}

/// [`LANES`] units per row.
#[cube(launch_unchecked)]
fn stats_of_rows<N: Size>(
    y: &Array<Vector<u32, N>>,
    dy: &Array<Vector<u32, N>>,
    y_heads: HeadsGeometry,
    dy_heads: HeadsGeometry,
    lse: &Array<f32>,
    stats: &mut Array<f32>,
    heads: u32,
    queries: u32,
    #[comptime] element_type: ElementType,
    #[comptime] isa: Isa,
    #[comptime] _version: Version,
) {
    let rows = stats.len() as u32 / 2;
    let first = CUBE_POS as u32 * comptime!(UNITS / LANES);
    if first >= rows {
        terminate!();
    }
    let row = first + UNIT_POS / LANES;
    let number = min(row, rows - 1);
    let padded = padded(queries);
    let (head, place) = (number / padded, number % padded);
    let position = min(place, queries - 1);
    let at_y = y_heads.of(head / heads, head % heads);
    let at_dy = dy_heads.of(head / heads, head % heads);
    let len = comptime!(element_type.vector_len());
    let mut sum = 0.0f32.runtime();
    let mut col = UNIT_POS % LANES * len;
    while col < at_y.cols {
        let (mut a, mut b) = (Array::<u32>::new(4usize), Array::<u32>::new(4usize));
        load_vector(y, &at_y, position, col, &mut a, 0u32, element_type, isa);
        load_vector(dy, &at_dy, position, col, &mut b, 0u32, element_type, isa);
        #[unroll]
        for i in 0..len {
            let product = f32::reinterpret(element(&a, 0u32, i, element_type, isa))
                * f32::reinterpret(element(&b, 0u32, i, element_type, isa));
            sum += select(col + i < at_y.cols, product, 0.0f32);
        }
        col += comptime!(LANES * element_type.vector_len());
    }
    let sum = lanes_sum(sum, LANES, isa);
    if row < rows && UNIT_POS.is_multiple_of(LANES) {
        let own = lse[(head * queries + position) as usize];
        stats[row as usize] = select(own <= NOTHING || place >= queries, -HIDDEN, own);
        stats[(rows + row) as usize] = select(place >= queries, 0.0f32, sum);
    }
}
