//! [`Work`]: the part of a GEMM that one tile computes. All kernels traverse the tiles of one
//! matrix in bands, and grouped tiles one group after the other.

use cubecl::prelude::*;

use super::grouped::{GROUP_ALIGN, Grouping};
use crate::grid::banded_tile;

/// Part of a GEMM that a tile computes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    /// First row of A and of the output. A multiple of the tile's rows if the tile exists. It may
    /// have no rows to write.
    pub(super) row0: u32,
    /// Range of rows to write.
    pub(super) row_begin: u32,
    pub(super) row_end: u32,
    /// First column of the output. Before column 0 if it wraps around.
    pub(super) col0: u32,
    /// Row of B for column 0.
    pub(super) row0_b: u32,
    /// Range of the contraction, in codes.
    pub(super) k_begin: u32,
    pub(super) k_end: u32,
    /// Output matrix, if each group has one.
    pub(super) matrix: u32,
    /// Output element at row 0 and column 0 of that matrix.
    pub(super) out0: u32,
}

/// End of group `group`, at most `limit`. Negative ends count as 0.
#[cube]
fn end_of(ends: &Array<u32>, group: u32, limit: u32) -> u32 {
    let end = ends[group as usize];
    select(end > comptime!(i32::MAX as u32), 0u32, min(end, limit))
}

/// Tiles of `height` rows that overlap `start..end`.
#[cube]
fn tiles_of(start: u32, end: u32, #[comptime] height: u32) -> u32 {
    select(start < end, end.div_ceil(height) - start / height, 0u32)
}

/// Sizes of a grouped GEMM: groups, rows and columns of one output matrix, and the whole
/// contraction.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GroupSizes {
    pub(super) groups: u32,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
}

/// Group that a block has reached. A block's tile numbers ascend, so it resumes from here and
/// visits no group twice.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GroupCursor {
    group: u32,
    /// Tiles of the preceding groups, if groups divide rows.
    passed: u32,
    /// Start of the group before alignment: the end of the previous group.
    start: u32,
}

/// Cursor at the first group.
#[cube]
pub(super) fn first_group() -> GroupCursor {
    let zero = 0u32.runtime();
    GroupCursor { group: zero, passed: zero, start: zero }
}

/// End of the rows of the cursor's group. Rows after the last group count as one more group,
/// without a matrix.
#[cube]
fn rows_end(cursor: &GroupCursor, ends: &Array<u32>, sizes: &GroupSizes) -> u32 {
    let end = max(cursor.start, end_of(ends, min(cursor.group, sizes.groups - 1), sizes.m));
    select(cursor.group < sizes.groups, end, sizes.m)
}

/// Work of tile `number` of size `tile`, for a block or a cluster, with `cols` tiles along N.
///
/// Groups come one after the other, each in bands. A tile with rows of two groups is computed for
/// both, and each writes its rows, so that tiles stay aligned. Columns start where the row of B is
/// a multiple of `align`. A tile that does not exist has no rows. The cursor must not be past the
/// group of this or a later tile.
#[cube]
pub(super) fn grouped_tile(
    number: u32,
    cols: u32,
    ends: &Array<u32>,
    sizes: &GroupSizes,
    cursor: &mut GroupCursor,
    #[comptime] grouping: Grouping,
    #[comptime] tile: [u32; 2],
    #[comptime] align: u32,
) -> Work {
    let (groups, m, n, k) = (sizes.groups, sizes.m, sizes.n, sizes.k);
    let [height, width] = comptime!(tile);
    if comptime!(grouping == Grouping::Rows) {
        let mut end = rows_end(cursor, ends, sizes);
        while cursor.group < groups && number - cursor.passed >= tiles_of(cursor.start, end, height) * cols {
            cursor.passed += tiles_of(cursor.start, end, height) * cols;
            cursor.group += 1;
            cursor.start = end;
            end = rows_end(cursor, ends, sizes);
        }
        let (group, start, left) = (cursor.group, cursor.start, number - cursor.passed);
        let rows = tiles_of(start, end, height);
        let is_tile = left < rows * cols;
        let (row, col) = banded_tile(select(is_tile, left, 0u32), max(rows, 1u32), cols);
        let row0_b = select(group < groups, group * n, 0u32);
        let shift = row0_b % align;
        let exists = is_tile && col * width < n + shift;
        Work {
            row0: select(exists, (start / height + row) * height, end),
            row_begin: start,
            row_end: end,
            col0: col * width - shift,
            row0_b,
            k_begin: 0u32.runtime(),
            k_end: select(exists && group < groups, k, 0u32),
            matrix: 0u32.runtime(),
            out0: 0u32.runtime(),
        }
    } else {
        let rows = m.div_ceil(height);
        let group = number / (rows * cols);
        let (row, col) = banded_tile(number % (rows * cols), rows, cols);
        let exists = group < groups;
        let last = min(group, groups - 1);
        let align_k = comptime!(GROUP_ALIGN as u32);
        while cursor.group < last {
            cursor.start = max(cursor.start, end_of(ends, cursor.group, k));
            cursor.group += 1;
        }
        let first = cursor.start.div_ceil(align_k) * align_k;
        let end = max(first, end_of(ends, last, k));
        Work {
            row0: select(exists, row * height, m),
            row_begin: 0u32.runtime(),
            row_end: m,
            col0: col * width,
            row0_b: 0u32.runtime(),
            k_begin: first,
            k_end: select(exists, end, first),
            matrix: group,
            out0: group * m * n,
        }
    }
}
