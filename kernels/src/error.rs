//! Errors of kernel calls, each with the offending values.

use cubecl::ir::StorageType;

use crate::{Granularity, ScaleMode};

/// Reason why a kernel was not launched.
///
/// Every check runs on the host before anything is allocated or launched. So an error leaves no
/// trace on the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dimension is zero, so there is no amax, no scale and no product.
    #[error("an empty matrix of shape [{rows}, {cols}] has no amax and no scale")]
    EmptyMatrix {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix (the contraction length of an operand).
        cols: usize,
    },
    /// The operands of a GEMM have different contraction lengths.
    #[error("the operands contract over different lengths: k = {a} and k = {b}")]
    ContractionMismatch {
        /// Contraction length of the left operand.
        a: usize,
        /// Contraction length of the right operand.
        b: usize,
    },
    /// The bias does not have one value per output column.
    #[error("the bias has {bias} elements, the output has {n} columns")]
    BiasMismatch {
        /// Elements of the bias.
        bias: usize,
        /// Columns of the output.
        n: usize,
    },
    /// The dtype is not f32, f16 or bf16, or it is a 16-bit float that the device does not support.
    #[error("dtype {dtype} cannot be used here: the kernels take f32, f16 and bf16 where the device has them")]
    UnsupportedDtype {
        /// Requested dtype.
        dtype: StorageType,
    },
    /// The memory is shorter than its contents.
    #[error("{what} need {needed} bytes, their memory has {available}")]
    OutOfBounds {
        /// Contents, with their shape.
        what: String,
        /// Bytes that the contents need.
        needed: u64,
        /// Bytes that the memory has.
        available: u64,
    },
    /// A handle starts in the middle of an element.
    #[error("the handle starts at byte {offset}, which is not a multiple of the element's {size} bytes")]
    Misaligned {
        /// Byte offset of the handle in its allocation.
        offset: u64,
        /// Bytes of one element.
        size: usize,
    },
    /// The matrix needs indices above the limit of 32-bit kernels.
    #[error("a matrix of shape [{rows}, {cols}] (strides {strides:?}) needs indices above {limit}")]
    TooLarge {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Strides in elements.
        strides: [usize; 2],
        /// Largest index that the kernels reach.
        limit: u64,
    },
    /// The granularity does not fit the operation.
    #[error("{granularity} {reason}")]
    UnfitGranularity {
        /// Requested granularity.
        granularity: Granularity,
        /// Reason, as the end of a sentence.
        reason: &'static str,
    },
    /// The rows of B are not a multiple of the number of groups, or there are no groups.
    #[error("B has {rows} rows, which {groups} groups cannot share evenly")]
    UnevenGroups {
        /// Rows of B.
        rows: usize,
        /// Number of groups.
        groups: usize,
    },
    /// E8M0 scales without 1x32 blocks, or 1x32 blocks without E8M0 scales.
    #[error("{granularity} scales cannot be {scale_mode}: e8m0 goes with 1x32, and with nothing else")]
    ScaleModeMismatch {
        /// Requested granularity.
        granularity: Granularity,
        /// Requested scale mode.
        scale_mode: ScaleMode,
    },
    /// All kernels for this call are disabled on the device, because their self-checks failed.
    #[error("every kernel that could compute this is disabled on this device: their self-checks failed")]
    Disabled,
    /// The kernel needs contiguous memory, but the view is transposed or has gaps.
    #[error("the elements of a matrix of shape {shape:?} with strides {strides:?} do not follow each other")]
    NotContiguous {
        /// Rows and columns.
        shape: [usize; 2],
        /// Strides in elements.
        strides: [usize; 2],
    },
    /// The shapes of two matrices, or of a matrix and an operand, do not match.
    #[error("x is [{}, {}] but the operand [{}, {}]", x[0], x[1], operand[0], operand[1])]
    ShapeMismatch {
        /// Rows and columns of the matrix.
        x: [usize; 2],
        /// Rows and contraction length of the operand.
        operand: [usize; 2],
    },
}
