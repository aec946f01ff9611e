//! One GEMM for each group of tokens, in one launch: what the experts of a mixture multiply. Group sizes are on the device; the
//! host knows only how many groups there are.
//!
//! ```text
//! Rows         out [M, N],    row i of group g:  out_i = A_i · B_gᵀ        A [M, K], B [G·N, K]       forward, input gradient
//! Contraction  out [G, M, N],  out_g = Σ over the k of group g  A_k · B_kᵀ  A [M, K], B [N, K]        weight gradient
//! ```
//!
//! `ends[g]` is where group `g` ends. It begins where group `g - 1` ends; along the contraction at the next multiple of
//! [`GROUP_ALIGN`] after that, the codes between being zero, so that no block of scales and no 16 bytes belong to two groups.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Gemm, GemmConfig, GemmPath, emulated};
use crate::operand::{BLOCK, check_size};
use crate::view::Source;
use crate::{Granularity, KernelError, Operand, supports};

/// What the first of a group's contraction is a multiple of.
pub const GROUP_ALIGN: usize = BLOCK;

/// Which axis of the operands the groups divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// The rows of A; B has as many matrices as there are groups, above each other.
    Rows,
    /// The contraction of both.
    Contraction,
}

/// The groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct Groups {
    /// `count` 32-bit integers, ascending, none negative: the end of each group. What an end exceeds the axis by does not count,
    /// and one below its predecessor is taken for that.
    pub ends: Handle,
    /// How many, from 1.
    pub count: usize,
    /// What they divide.
    pub grouping: Grouping,
}

impl Groups {
    fn check(&self) -> Result<(), KernelError> {
        if self.count == 0 {
            return Err(KernelError::NoGroups);
        }
        let offset = self.ends.offset_start.unwrap_or(0);
        if !offset.is_multiple_of(4) {
            return Err(KernelError::Misaligned { offset, size: 4 });
        }
        let (needed, available) = (4 * self.count as u64, self.ends.size_in_used());
        if needed > available { Err(KernelError::OutOfBounds { needed, available }) } else { Ok(()) }
    }

    /// Rows and columns of one matrix of the output, and how many there are.
    fn output(&self, a: &Operand, b: &Operand) -> Result<[usize; 3], KernelError> {
        match self.grouping {
            Grouping::Rows if !b.rows.is_multiple_of(self.count) => {
                Err(KernelError::UnevenGroups { rows: b.rows, groups: self.count })
            }
            Grouping::Rows => Ok([a.rows, b.rows / self.count, 1]),
            Grouping::Contraction => Ok([a.rows, b.rows, self.count]),
        }
    }

    /// The ends as a kernel argument.
    pub(super) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `check` has measured them.
        unsafe { ArrayArg::from_raw_parts(self.ends.clone(), self.count) }
    }

    /// Tiles of a kernel whose tiles have `rows` by `cols`, for an output of `m` by `n`: as many as there can be, whatever the sizes
    /// of the groups.
    pub(super) fn tiles(&self, [m, n]: [usize; 2], [rows, cols]: [usize; 2]) -> usize {
        let by_group = match self.grouping {
            // Each group but one can add a tile that is not full, and so can the rows that no group has.
            Grouping::Rows => m.div_ceil(rows) + self.count,
            Grouping::Contraction => m.div_ceil(rows) * self.count,
        };
        by_group * n.div_ceil(cols)
    }
}

/// The kernel that [`grouped_scaled_gemm`] dispatches to on this device.
pub fn grouped_gemm_path<R: Runtime>(
    _client: &ComputeClient<R>,
    _granularities: [Granularity; 2],
    _grouping: Grouping,
    _config: GemmConfig,
) -> GemmPath {
    GemmPath::Emulated
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
    a.check()?;
    b.check()?;
    groups.check()?;
    if a.k != b.k {
        return Err(KernelError::ContractionMismatch { a: a.k, b: b.k });
    }
    let [m, n, count] = groups.output(a, b)?;
    check_size(m * count, n, n)?;
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
    emulated::launch(client, &gemm);
    Ok(handle)
}

/// A tile's part of the work.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    /// First row of A, and of the output.
    pub(super) row0: u32,
    /// Where the rows end.
    pub(super) rows: u32,
    /// First column of the output.
    pub(super) col0: u32,
    /// Row of B that belongs to column 0.
    pub(super) row0_b: u32,
    /// Where the contraction begins and ends, in codes.
    pub(super) first: u32,
    pub(super) end: u32,
    /// Element of the output that belongs to row 0 and column 0.
    pub(super) out0: u32,
}

/// Tile `number` of `rows` by `cols`, of an output whose matrices have `m` by `n`, over a contraction of `k`. A tile that does not
/// exist has no rows.
#[cube]
pub(super) fn grouped_tile(
    number: u32,
    ends: &Array<u32>,
    groups: u32,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] grouping: Grouping,
    #[comptime] rows: u32,
    #[comptime] cols: u32,
) -> Work {
    let tiles_per_row = n.div_ceil(cols);
    let col0 = number % tiles_per_row * cols;
    let number = number / tiles_per_row;
    if comptime!(grouping == Grouping::Rows) {
        let mut left = number;
        let mut group = 0u32.runtime();
        let mut start = 0u32.runtime();
        let mut end = min(ends[0], m);
        // The rows after the last group are one more, without a matrix.
        while group < groups && left >= (end - start).div_ceil(rows) {
            left -= (end - start).div_ceil(rows);
            group += 1;
            start = end;
            end = select(group < groups, max(start, min(ends[min(group, groups - 1) as usize], m)), m);
        }
        let has_matrix = group < groups;
        Work {
            row0: min(start + left * rows, end),
            rows: end,
            col0,
            row0_b: select(has_matrix, group * n, 0u32.runtime()),
            first: 0u32.runtime(),
            end: select(has_matrix, k, 0u32.runtime()),
            out0: 0u32.runtime(),
        }
    } else {
        let tiles_per_col = m.div_ceil(rows);
        let group = number / tiles_per_col;
        let exists = group < groups;
        let align = comptime!(GROUP_ALIGN as u32);
        let before = min(ends[(max(min(group, groups - 1), 1u32) - 1) as usize], k);
        let first = select(group == 0, 0u32.runtime(), before.div_ceil(align) * align);
        let end = min(ends[min(group, groups - 1) as usize], k);
        Work {
            row0: select(exists, number % tiles_per_col * rows, m),
            rows: m,
            col0,
            row0_b: 0u32.runtime(),
            first,
            end: max(first, end),
            out0: group * m * n,
        }
    }
}
