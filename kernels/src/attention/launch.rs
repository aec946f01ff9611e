//! Launches: the [`Role`] of a kernel, and the arguments that the kernels share.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::prepare::padded;
use super::problem::{Classes, Heads, HeadsGeometry, Item, Scores, ScoresLaunch, Span};
use super::{CheckedHeads, HIDDEN, TILE};
use crate::load::Geometry;

/// Results that a launch computes. Rows stay in a cube while columns pass by.
///
/// | role | rows | columns | weights P times | slopes dS times |
/// | --- | --- | --- | --- | --- |
/// | forward, part | q | k, v | v: y | |
/// | queries | q, dy | k, v | | k: dq |
/// | keys | k, v | q, dy | dy: dv | q: dk |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    Forward,
    /// Forward over a part of the keys. Results are f32 `[parts, B, heads, rows, ..]`.
    Part,
    Queries,
    /// At least one of dk and dv.
    Keys {
        dk: bool,
        dv: bool,
    },
}

impl Role {
    pub(super) const fn rows_are_keys(self) -> bool {
        matches!(self, Self::Keys { .. })
    }

    /// Whether it computes y.
    pub(super) const fn is_forward(self) -> bool {
        matches!(self, Self::Forward | Self::Part)
    }

    /// Whether it sums products of weights: y or dv.
    pub(super) const fn sums_weights(self) -> bool {
        self.is_forward() || matches!(self, Self::Keys { dv: true, .. })
    }

    /// Whether it sums products of slopes: dq or dk.
    pub(super) const fn sums_slopes(self) -> bool {
        matches!(self, Self::Queries | Self::Keys { dk: true, .. })
    }
}

/// Inputs of backward: dy and the statistics of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward<'a> {
    pub(super) dy: &'a Heads,
    pub(super) stats: &'a Handle,
}

/// A launch and its results.
pub(super) struct Launch<'a> {
    pub(super) problem: &'a CheckedHeads,
    pub(super) role: Role,
    /// The operands of S, then of dP or of y.
    pub(super) rows: [&'a Heads; 2],
    pub(super) cols: [&'a Heads; 2],
    stats: Option<&'a Handle>,
    classes: Option<&'a Classes>,
    /// y or dv, dq or dk, and lse, if the role has them.
    pub(super) results: [Option<Handle>; 3],
}

impl<'a> Launch<'a> {
    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        problem: &'a CheckedHeads,
        role: Role,
        backward: Option<Backward<'a>>,
        classes: Option<&'a Classes>,
    ) -> Self {
        let CheckedHeads { query, key, value, config, .. } = problem;
        // Forward reads no second operand of rows.
        let dy = backward.map_or(query, |backward| backward.dy);
        let (mut rows, mut cols) = ([query, dy], [key, value]);
        if role.rows_are_keys() {
            core::mem::swap(&mut rows, &mut cols);
        }
        let [batch, heads, positions, dim] = rows[0].shape();
        let [.., width] = value.shape();
        let size = if role == Role::Part { size_of::<f32>() } else { config.element_type.size() };
        let rows_of_results = problem.parts.unwrap_or(1) * batch * heads * positions;
        let results = [
            (role.sums_weights(), width * size),
            (role.sums_slopes(), dim * size),
            (role.is_forward(), size_of::<f32>()),
        ];
        let results = results.map(|(has, bytes)| has.then(|| client.empty(rows_of_results * bytes)));
        let stats = backward.map(|backward| backward.stats);
        Self { problem, role, rows, cols, stats, classes, results }
    }

    /// Items, of `rows` rows of a head each. Each part has all of them.
    pub(super) fn items(&self, rows: u32) -> u32 {
        let [batch, heads, positions, _] = self.rows[0].shape();
        (self.problem.parts.unwrap_or(1) * batch * heads) as u32 * (positions as u32).div_ceil(rows)
    }

    pub(super) fn operands<R: Runtime>(&self, rows: u32) -> OperandsLaunch<R> {
        let [[row, second_row], [col, second_col]] = [self.rows, self.cols].map(|sides| sides.map(Heads::geometry));
        let deltas = self.stats.map_or(0, |stats| stats.size_in_used() / 8);
        let stats = self.stats.map(|stats| whole(stats, 4)).into();
        let (batch, parts) = (self.rows[0].shape()[0] as u32, self.problem.parts.unwrap_or(1) as u32);
        let items = self.items(rows);
        OperandsLaunch::new(row, second_row, col, second_col, stats, deltas as u32, batch, parts, items)
    }

    pub(super) fn scores<R: Runtime>(&self) -> ScoresLaunch<R> {
        ScoresLaunch::of(self.problem, self.classes)
    }

    /// Result `index` as elements of `size` bytes.
    pub(super) fn result<R: Runtime, T: LaunchArg<RuntimeArg<R> = ArrayArg<R>>>(
        &self,
        index: usize,
        size: usize,
    ) -> ComptimeOptionArgs<T, R> {
        self.results[index].as_ref().map(|memory| whole(memory, size)).into()
    }
}

fn whole<R: Runtime>(memory: &Handle, size: usize) -> ArrayArg<R> {
    // SAFETY: the memory has this many elements.
    unsafe { ArrayArg::from_raw_parts(memory.clone(), memory.size_in_used() as usize / size) }
}

/// Geometry of the operands, and statistics of queries for backward.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Operands {
    rows: HeadsGeometry,
    second_rows: HeadsGeometry,
    pub(super) cols: HeadsGeometry,
    pub(super) second_cols: HeadsGeometry,
    pub(super) stats: ComptimeOption<Array<f32>>,
    /// Index of the first δ. CubeCL gives kernels with tensor maps wrong lengths of arrays.
    pub(super) deltas: u32,
    batch: u32,
    parts: u32,
    pub(super) items: u32,
}

/// Logarithm of the sum of exponentials of a query's scores, and its δ.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Stat {
    pub(super) lse: f32,
    pub(super) delta: f32,
}

#[cube]
impl Operands {
    /// Inputs of an item of results. A part's batches of results follow the previous part's.
    pub(super) fn inputs(&self, results: &Item, #[comptime] role: Role) -> Item {
        let batch = if comptime!(role == Role::Part) { results.batch % self.batch } else { results.batch };
        Item { row0: results.row0, head: results.head, batch }
    }

    /// Columns that some rows of an item of results see, in its part of the keys.
    pub(super) fn span(&self, scores: &Scores, results: &Item, #[comptime] rows: u32, #[comptime] role: Role) -> Span {
        let mut span = scores.span(results.row0, rows, comptime!(role.rows_are_keys()));
        if comptime!(role == Role::Part) {
            let each = scores.keys.div_ceil(TILE).div_ceil(self.parts) * TILE;
            span.first = results.batch / self.batch * each;
            span.end = min(span.end, span.first + each);
        }
        span
    }

    /// Positions of both operands of rows.
    pub(super) fn of_rows(&self, item: &Item) -> Sides {
        Sides { first: self.rows.of(item.batch, item.head), second: self.second_rows.of(item.batch, item.head) }
    }

    /// Positions of both operands of columns.
    pub(super) fn of_cols(&self, batch: u32, head: u32) -> Sides {
        Sides { first: self.cols.of(batch, head), second: self.second_cols.of(batch, head) }
    }

    /// Index of the statistics of a head's first query.
    pub(super) fn first_stat(&self, scores: &Scores, place: &Item) -> u32 {
        (place.batch * scores.heads + place.head) * padded(scores.queries)
    }

    /// Statistics of a query. Past the last, weights are 0.
    pub(super) fn stat(&self, scores: &Scores, place: &Item, query: u32) -> Stat {
        #[comptime]
        match &self.stats {
            ComptimeOption::Some(stats) => {
                let at = self.first_stat(scores, place) + min(query, scores.queries - 1);
                let lse = select(query < scores.queries, stats[at as usize], -HIDDEN);
                Stat { lse, delta: stats[(self.deltas + at) as usize] }
            }
            ComptimeOption::None => Stat { lse: 0.0f32.runtime(), delta: 0.0f32.runtime() },
        }
    }
}

/// Positions of the first and second operand of a side.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sides {
    pub(super) first: Geometry,
    pub(super) second: Geometry,
}

/// First element of a result's row 0 and elements between rows. y is `[B, T, H, e]`, others are
/// `[B, heads, positions, width]`; parts of y are `[parts · B, ..]`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowPlace {
    pub(super) first: u32,
    pub(super) stride: u32,
}

#[cube]
impl RowPlace {
    /// Place of a head's rows in a result with `width` columns.
    pub(super) fn of(item: &Item, scores: &Scores, width: u32, #[comptime] role: Role) -> RowPlace {
        if comptime!(role == Role::Forward) {
            let stride = scores.heads * width;
            RowPlace { first: item.batch * scores.queries * stride + item.head * width, stride }
        } else if comptime!(role.rows_are_keys()) {
            RowPlace { first: (item.batch * scores.kv_heads + item.head) * scores.keys * width, stride: width }
        } else {
            RowPlace { first: (item.batch * scores.heads + item.head) * scores.queries * width, stride: width }
        }
    }
}
