//! Grouped GEMM: one product per group of tokens in a single launch, as for mixture-of-experts
//! layers. Group sizes are on the device; the host knows only the number of groups.
//!
//! ```text
//! Rows         out [M, N],    row i of group g:  out_i = A_i · B_gᵀ        A [M, K], B [G·N, K]       forward, input gradient
//! Contraction  out [G, M, N],  out_g = Σ over the k of group g  A_k · B_kᵀ  A [M, K], B [N, K]        weight gradient
//! ```
//!
//! `ends[g]` is the end of group `g`. A group starts at the end of group `g - 1`. Along the
//! contraction it starts at the next multiple of [`GROUP_ALIGN`]. So no block of scales and no 16
//! bytes belong to two groups. Codes between an end and that multiple are zero, also after the last
//! group.
//!
//! 128x128 blocks of scales are counted over all rows of an operand, independent of groups. Tiles
//! of A start at multiples of their height, so groups change nothing for A. If the rows of a
//! group's matrix of B are not a multiple of 128, two groups share a block. A tile's columns then
//! can reach one more block, and each column has a separate scale
//! ([`GemmShape::scales_b_differ`](super::GemmShape::scales_b_differ)).

use core::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{GemmArgs, GemmConfig};
use crate::granularity::BLOCK;
use crate::view::{check_aligned, check_bytes};
use crate::{KernelError, Operand};

/// Alignment of a group's start along the contraction.
pub const GROUP_ALIGN: usize = BLOCK;

/// Axis of the operands that the groups divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// Rows of A. B has one matrix per group, stacked by rows.
    Rows,
    /// Contraction of both.
    Contraction,
}

impl Grouping {
    /// Range of each group on an axis of this length, from their [`Groups::ends`].
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

    /// Maximum number of tiles of `height` rows along M, for `count` groups of matrices of `m` rows
    /// and any group sizes.
    pub(super) const fn row_tiles(self, count: usize, m: usize, height: usize) -> usize {
        match self {
            // Two groups, or a group and the rows after the last, may share a tile.
            Grouping::Rows => m.div_ceil(height) + count,
            Grouping::Contraction => m.div_ceil(height) * count,
        }
    }
}

/// The groups of a grouped GEMM.
#[derive(Clone, Debug)]
pub struct Groups {
    /// `count` signed 32-bit integers, ascending: the end of each group. An end is clamped to the
    /// length of the axis, and from below to 0 and to the previous end.
    pub ends: Handle,
    /// Number of groups, at least 1.
    pub count: usize,
    /// Axis that they divide.
    pub grouping: Grouping,
}

impl Groups {
    /// Checks the groups for a second operand of `rows_b` rows.
    pub(super) fn check(&self, rows_b: usize) -> Result<(), KernelError> {
        if self.count == 0 {
            return Err(KernelError::UnevenGroups { rows: rows_b, groups: 0 });
        }
        check_aligned(&self.ends, 4)?;
        check_bytes(&self.ends, (self.count as u64).saturating_mul(4), || format!("ends of {} groups", self.count))?;
        match self.grouping {
            Grouping::Rows if !rows_b.is_multiple_of(self.count) => {
                Err(KernelError::UnevenGroups { rows: rows_b, groups: self.count })
            }
            _ => Ok(()),
        }
    }

    /// Rows and columns of one output matrix, and the number of matrices.
    pub(super) const fn matrices(groups: Option<&Self>, [a, b]: [&Operand; 2]) -> (usize, usize, usize) {
        match groups {
            None => (a.rows, b.rows, 1),
            Some(Self { grouping: Grouping::Rows, count, .. }) => (a.rows, b.rows / *count, 1),
            Some(Self { grouping: Grouping::Contraction, count, .. }) => (a.rows, b.rows, *count),
        }
    }

    /// Ends as a kernel argument.
    pub(super) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `check` has checked their length.
        unsafe { ArrayArg::from_raw_parts(self.ends.clone(), self.count) }
    }
}

/// Products of each group, contiguous, in the dtype `out`: `[M, N]` for [`Grouping::Rows`],
/// `[G, M, N]` for [`Grouping::Contraction`]. Rows outside all groups are zero, and so is the
/// product of an empty group.
///
/// Sums and scales are the same as for [`scaled_gemm`](crate::scaled_gemm). Scales are looked up by
/// the operand's row. A per-tensor scale is shared by all groups. A per-row scale is shared by all
/// groups along the contraction.
///
/// # Errors
/// The errors of [`scaled_gemm`](crate::scaled_gemm); [`KernelError::UnevenGroups`] if the rows of
/// B are not a multiple of the number of groups.
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
