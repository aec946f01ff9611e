//! [`LinearPart`]: part of a linear that ranks divide (tensor parallelism).
use std::ops::Range;

use crate::terms::Role;

/// Axis of a linear's weight `[K, N]` that ranks divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParallelStyle {
    /// Columns: each rank computes some of y's columns.
    Colwise,
    /// Rows: each rank computes a term of y.
    Rowwise,
}

/// Axis of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The first.
    Rows,
    /// The last.
    Cols,
}

impl ParallelStyle {
    /// Axis of x `[M, K]`, w `[K, N]` or dy `[M, N]` that ranks divide.
    pub fn divided(self, role: Role) -> Axis {
        match (self, role) {
            (Self::Colwise, Role::Input) | (Self::Rowwise, Role::Weight | Role::GradOutput) => Axis::Rows,
            (Self::Colwise, Role::Weight | Role::GradOutput) | (Self::Rowwise, Role::Input) => Axis::Cols,
        }
    }

    /// Whether each rank has some tokens of x or dy, and its GEMMs read all of them.
    pub(crate) fn gathers(self, role: Role) -> bool {
        role != Role::Weight && self.divided(role) == Axis::Rows
    }
}

/// Part of a linear on this rank.
#[derive(Clone, Copy, Debug)]
pub struct LinearPart {
    /// Axis of the weight.
    pub style: ParallelStyle,
    /// Number of ranks.
    pub ranks: usize,
    /// This rank, from 0.
    pub rank: usize,
}

impl LinearPart {
    /// This rank's range of a divided axis.
    pub fn range(self, whole: usize) -> Range<usize> {
        let own = whole / self.ranks;
        self.rank * own..(self.rank + 1) * own
    }
}
