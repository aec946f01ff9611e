//! One GEMM for each group of tokens, in one launch: what the experts of a mixture multiply. Group sizes are on the device; the
//! host knows only how many groups there are.
//!
//! ```text
//! Rows         out [M, N],    row i of group g:  out_i = A_i · B_gᵀ        A [M, K], B [G·N, K]       forward, input gradient
//! Contraction  out [G, M, N],  out_g = Σ over the k of group g  A_k · B_kᵀ  A [M, K], B [N, K]        weight gradient
//! ```
//!
//! `ends[g]` is where group `g` ends. It begins where group `g - 1` ends; along the contraction at the next multiple of
//! [`GROUP_ALIGN`] after that, so that no block of scales and no 16 bytes belong to two groups. From each end to there, the
//! last one's too, codes are zero.
//!
//! Blocks of scales are those of the operand as a whole, across the ends of groups of rows: a square of 128 by 128 may have rows of
//! two. Of A that is no matter to tiles, which begin at multiples of their height; of B, where matrices of other than a multiple of
//! 128 rows follow each other, columns of a tile differ in their scales ([`Gemm::scales_b_differ`]).

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Gemm, GemmConfig, check_pair, gemm_path};
use crate::granularity::BLOCK;
use crate::grid::banded_tile;
use crate::operand::check_size;
use crate::view::Source;
use crate::{KernelError, Operand, supports};

/// What the first of a group's contraction is a multiple of.
pub const GROUP_ALIGN: usize = BLOCK;

/// Which axis of the operands the groups divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// The rows of A; B has as many matrices as there are groups, stacked by rows.
    Rows,
    /// The contraction of both.
    Contraction,
}

/// The groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct Groups {
    /// `count` signed 32-bit integers, ascending: the end of each group. What an end exceeds the axis by does not count, a negative
    /// one is 0, and one below its predecessor is taken for that.
    pub ends: Handle,
    /// How many, from 1.
    pub count: usize,
    /// What they divide.
    pub grouping: Grouping,
}

impl Groups {
    /// For operands whose second has `rows_b` rows.
    fn check(&self, rows_b: usize) -> Result<(), KernelError> {
        if self.count == 0 {
            return Err(KernelError::NoGroups);
        }
        let offset = self.ends.offset_start.unwrap_or(0);
        if !offset.is_multiple_of(4) {
            return Err(KernelError::Misaligned { offset, size: 4 });
        }
        let (needed, available) = ((self.count as u64).saturating_mul(4), self.ends.size_in_used());
        if needed > available {
            return Err(KernelError::OutOfBounds { needed, available });
        }
        match self.grouping {
            Grouping::Rows if !rows_b.is_multiple_of(self.count) => {
                Err(KernelError::UnevenGroups { rows: rows_b, groups: self.count })
            }
            _ => Ok(()),
        }
    }

    /// Rows and columns of one matrix of the output, and how many there are, for operands of `rows_a` and `rows_b` rows.
    pub(super) const fn matrices(&self, rows_a: usize, rows_b: usize) -> (usize, usize, usize) {
        match self.grouping {
            Grouping::Rows => (rows_a, rows_b / self.count, 1),
            Grouping::Contraction => (rows_a, rows_b, self.count),
        }
    }

    /// The ends as a kernel argument.
    pub(super) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `check` has measured them.
        unsafe { ArrayArg::from_raw_parts(self.ends.clone(), self.count) }
    }

    /// Tiles of `height` rows along M, for matrices of `m` rows: as many as there can be, whatever the groups' sizes.
    pub(super) fn row_tiles(&self, m: usize, height: usize) -> usize {
        match self.grouping {
            // Where a group ends, and the rows that none has begin, a tile may be the work of two.
            Grouping::Rows => m.div_ceil(height) + self.count,
            Grouping::Contraction => m.div_ceil(height) * self.count,
        }
    }
}

/// The products of each group, contiguous, in the dtype `out`: `[M, N]` for [`Grouping::Rows`], `[G, M, N]` for
/// [`Grouping::Contraction`]. Rows that no group has are zero, and so is the product of an empty group.
///
/// Sums and scales are those of [`scaled_gemm`](crate::scaled_gemm). Scales are looked up by the row of the operand: with one
/// scale for the tensor all groups share it, with one for each row of the contraction all groups along it do.
///
/// # Errors
/// Those of [`scaled_gemm`](crate::scaled_gemm); [`KernelError::NoGroups`], [`UnevenGroups`](KernelError::UnevenGroups) if the rows
/// of B are no multiple of the groups.
pub fn grouped_scaled_gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    groups: &Groups,
    out: StorageType,
    config: GemmConfig,
) -> Result<Handle, KernelError> {
    check_pair(a, b)?;
    groups.check(b.rows)?;
    let (m, n, count) = groups.matrices(a.rows, b.rows);
    check_size(m.saturating_mul(count), n, n)?;
    if !supports(client, out) {
        return Err(KernelError::UnsupportedDtype { dtype: out });
    }
    let dtype = Source::of(out)?.storage();
    let handle = client.empty(m * n * count * dtype.size());
    let gemm = Gemm {
        a,
        b,
        bias: None,
        out: &handle,
        dtype,
        accumulate: false,
        use_fast_accum: config.use_fast_accum,
        groups: Some(groups),
    };
    gemm.launch(client, gemm_path(client, [a.granularity, b.granularity], config));
    Ok(handle)
}

/// A tile's part of the work.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    /// First row of A, and of the output: a multiple of the tile's rows.
    pub(super) row0: u32,
    /// Where the rows to write begin and end.
    pub(super) row_begin: u32,
    pub(super) row_end: u32,
    /// First column of the output; before column 0 if it wraps around.
    pub(super) col0: u32,
    /// Row of B that belongs to column 0.
    pub(super) row0_b: u32,
    /// Where the contraction begins and ends, in codes.
    pub(super) first: u32,
    pub(super) end: u32,
    /// Element of the output that belongs to row 0 and column 0.
    pub(super) out0: u32,
}

/// The work of a tile of an output that is one matrix.
#[cube]
pub(super) fn whole(row0: u32, col0: u32, m: u32, k: u32) -> Work {
    let zero = 0u32.runtime();
    Work { row0, row_begin: zero, row_end: m, col0, row0_b: zero, first: zero, end: k, out0: zero }
}

/// End number `group`, `limit` at most.
#[cube]
fn end_of(ends: &Array<u32>, group: u32, limit: u32) -> u32 {
    let end = ends[group as usize];
    select(end > comptime!(i32::MAX as u32), 0u32, min(end, limit))
}

/// Tiles of `height` rows that have rows of `start..end`.
#[cube]
fn tiles_of(start: u32, end: u32, #[comptime] height: u32) -> u32 {
    select(start < end, end.div_ceil(height) - start / height, 0u32)
}

/// Tile `number` of the size `tile`, `cols` beside each other, of an output whose matrices have `m` by `n`, over a contraction of
/// `k`: one group after the other, each in bands. A tile that has rows of two groups is the work of both, each writing its own, so
/// that tiles stay aligned. Columns begin where the row of B is a multiple of `align`. A tile that does not exist has no rows.
#[cube]
pub(super) fn grouped_tile(
    number: u32,
    cols: u32,
    ends: &Array<u32>,
    groups: u32,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] grouping: Grouping,
    #[comptime] tile: [u32; 2],
    #[comptime] align: u32,
) -> Work {
    let [height, width] = comptime!(tile);
    if comptime!(grouping == Grouping::Rows) {
        let mut left = number;
        let mut group = 0u32.runtime();
        let mut start = 0u32.runtime();
        let mut end = end_of(ends, 0u32, m);
        // The rows after the last group are one more, without a matrix.
        while group < groups && left >= tiles_of(start, end, height) * cols {
            left -= tiles_of(start, end, height) * cols;
            group += 1;
            start = end;
            end = select(group < groups, max(start, end_of(ends, min(group, groups - 1), m)), m);
        }
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
            first: 0u32.runtime(),
            end: select(exists && group < groups, k, 0u32),
            out0: 0u32.runtime(),
        }
    } else {
        let rows = m.div_ceil(height);
        let group = number / (rows * cols);
        let (row, col) = banded_tile(number % (rows * cols), rows, cols);
        let exists = group < groups;
        let last = min(group, groups - 1);
        let align_k = comptime!(GROUP_ALIGN as u32);
        let mut before = 0u32.runtime();
        for i in 0..last {
            before = max(before, end_of(ends, i, k));
        }
        let first = before.div_ceil(align_k) * align_k;
        let end = max(first, end_of(ends, last, k));
        Work {
            row0: select(exists, row * height, m),
            row_begin: 0u32.runtime(),
            row_end: m,
            col0: col * width,
            row0_b: 0u32.runtime(),
            first,
            end: select(exists, end, first),
            out0: group * m * n,
        }
    }
}
