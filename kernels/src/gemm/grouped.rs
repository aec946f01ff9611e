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
//! Squares of 128 by 128 are counted over all rows of an operand, whatever groups they belong to. Tiles of A begin at multiples of
//! their height, so groups change nothing for it. If a group's matrix of B has no multiple of 128 rows, two groups share a square, a
//! tile's columns can lie in one square more, and each column has a scale of its own ([`GemmShape::scales_b_differ`](super::GemmShape::scales_b_differ)).

use core::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{GemmArgs, GemmConfig};
use crate::granularity::BLOCK;
use crate::view::{check_aligned, check_bytes};
use crate::{KernelError, Operand};

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

impl Grouping {
    /// Where each group begins and ends on an axis of this length, given their ends as [`Groups::ends`] has them.
    pub fn spans(self, ends: &[i32], len: usize) -> Vec<Range<usize>> {
        let align = match self {
            Grouping::Rows => 1,
            Grouping::Contraction => GROUP_ALIGN,
        };
        let mut last = 0usize;
        let span = |&end: &i32| {
            let start = last.next_multiple_of(align).min(len);
            last = last.max(usize::try_from(end).unwrap_or(0).min(len));
            start..last.max(start)
        };
        ends.iter().map(span).collect()
    }

    /// Tiles of `height` rows along M, for `count` groups of matrices of `m` rows: as many as there can be, whatever the groups' sizes.
    pub(super) const fn row_tiles(self, count: usize, m: usize, height: usize) -> usize {
        match self {
            // Where a group ends, and the rows that none has begin, a tile may be the work of two.
            Grouping::Rows => m.div_ceil(height) + count,
            Grouping::Contraction => m.div_ceil(height) * count,
        }
    }
}

/// The groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct Groups {
    /// `count` signed 32-bit integers, ascending: the end of each group. An end is clamped to the length of the
    /// axis, and from below to 0 and to the end before it.
    pub ends: Handle,
    /// How many, from 1.
    pub count: usize,
    /// What they divide.
    pub grouping: Grouping,
}

impl Groups {
    /// For operands whose second has `rows_b` rows.
    pub(super) fn check(&self, rows_b: usize) -> Result<(), KernelError> {
        if self.count == 0 {
            return Err(KernelError::UnevenGroups { rows: rows_b, groups: 0 });
        }
        check_aligned(&self.ends, 4)?;
        check_bytes(&self.ends, (self.count as u64).saturating_mul(4))?;
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
}

/// The products of each group, contiguous, in the dtype `out`: `[M, N]` for [`Grouping::Rows`], `[G, M, N]` for
/// [`Grouping::Contraction`]. Rows that no group has are zero, and so is the product of an empty group.
///
/// Sums and scales are those of [`scaled_gemm`](crate::scaled_gemm). Scales are looked up by the row of the operand: with one
/// scale for the tensor all groups share it, with one for each row of the contraction all groups along it do.
///
/// # Errors
/// The errors of [`scaled_gemm`](crate::scaled_gemm); [`KernelError::UnevenGroups`] if the rows
/// of B are no multiple of the groups.
pub fn grouped_scaled_gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: &Operand,
    b: &Operand,
    groups: &Groups,
    out: StorageType,
    config: GemmConfig,
) -> Result<Handle, KernelError> {
    GemmArgs { a, b, bias: None, groups: Some(groups), dtype: out, config }.run(client, None)
}
