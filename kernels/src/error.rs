//! What can be wrong with a call, each case with the values that were wrong.

use cubecl::ir::StorageType;

use crate::{Format, Granularity, ScaleMode};

/// Why a kernel was not launched.
///
/// Every check runs on the host before anything is allocated or launched, so an error leaves no trace on the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dimension is zero: there is no amax, no scale and nothing to multiply.
    #[error("an empty matrix of shape [{rows}, {cols}] has no amax and no scale")]
    EmptyMatrix {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix (the contraction length of an operand).
        cols: usize,
    },
    /// The operands of a GEMM do not contract over the same length.
    #[error("the operands contract over different lengths: k = {a} and k = {b}")]
    ContractionMismatch {
        /// Contraction length of the left operand.
        a: usize,
        /// Contraction length of the right operand.
        b: usize,
    },
    /// The bias is not one value per output column.
    #[error("the bias has {bias} elements, the output has {n} columns")]
    BiasMismatch {
        /// Elements of the bias.
        bias: usize,
        /// Columns of the output.
        n: usize,
    },
    /// The kernels take f32, f16 and bf16, and write 16-bit floats only where the device has them.
    #[error("dtype {dtype} cannot be used here: the kernels take f32, f16 and bf16 where the device has them")]
    UnsupportedDtype {
        /// The dtype that was asked for.
        dtype: StorageType,
    },
    /// The memory behind a view ends before the view does.
    #[error("the view needs {needed} bytes, its memory has {available}")]
    OutOfBounds {
        /// Bytes from the start of the handle to the end of the last element.
        needed: u64,
        /// Bytes that the handle covers.
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
    /// The kernels index with 32 bits.
    #[error("a matrix of shape [{rows}, {cols}] (strides {strides:?}) needs indices above {limit}")]
    TooLarge {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Strides in elements.
        strides: [usize; 2],
        /// The largest index that the kernels reach.
        limit: u64,
    },
    /// An operand was not made by the quantize kernels for the format that it claims.
    #[error("the {format} operand [{rows}, {k}] needs {needed} bytes of codes, its handle has {available}")]
    BadOperand {
        /// Claimed format.
        format: Format,
        /// Claimed rows.
        rows: usize,
        /// Claimed contraction length.
        k: usize,
        /// Bytes that such codes take.
        needed: u64,
        /// Bytes that the handle covers.
        available: u64,
    },
    /// An operand has fewer scales than its granularity asks for.
    #[error("the {granularity} operand [{rows}, {k}] needs {needed} bytes of scales, its handle has {available}")]
    BadScales {
        /// Claimed granularity.
        granularity: Granularity,
        /// Claimed rows.
        rows: usize,
        /// Claimed contraction length.
        k: usize,
        /// Bytes that such scales take.
        needed: u64,
        /// Bytes that the handle covers.
        available: u64,
    },
    /// The granularity does not fit the operation.
    #[error("{granularity} {reason}")]
    UnfitGranularity {
        /// The granularity that was asked for.
        granularity: Granularity,
        /// Why it does not fit, as the end of a sentence.
        reason: &'static str,
    },
    /// The matrices of B, one for each of at least one group, have the same number of rows.
    #[error("B has {rows} rows, which {groups} groups cannot share evenly")]
    UnevenGroups {
        /// Rows of B.
        rows: usize,
        /// Groups.
        groups: usize,
    },
    /// E8M0 scales belong to blocks of 32, and blocks of 32 to E8M0 scales.
    #[error("{granularity} scales cannot be {scale_mode}: e8m0 goes with 1x32, and with nothing else")]
    ScaleModeMismatch {
        /// The granularity that was asked for.
        granularity: Granularity,
        /// The scale mode that was asked for.
        scale_mode: ScaleMode,
    },
    /// Nothing that could compute this on the device gave right results.
    #[error("every kernel that could compute this is disabled on this device: their self-checks failed")]
    Disabled,
    /// A kernel that goes through memory as it lies was given a view with gaps, or a transpose.
    #[error("the elements of a matrix of shape {shape:?} with strides {strides:?} do not follow each other")]
    NotContiguous {
        /// Rows and columns.
        shape: [usize; 2],
        /// Strides in elements.
        strides: [usize; 2],
    },
    /// A matrix is compared with an operand of another shape, or computed with one.
    #[error("x is [{}, {}] but the operand [{}, {}]", x[0], x[1], operand[0], operand[1])]
    ShapeMismatch {
        /// Rows and columns of the matrix.
        x: [usize; 2],
        /// Rows and contraction length of the operand.
        operand: [usize; 2],
    },
}

impl KernelError {
    /// An amax from outside belongs to the whole tensor.
    pub(crate) fn not_tensorwise(granularity: Granularity) -> Self {
        Self::UnfitGranularity {
            granularity,
            reason: "scales cannot come from a given amax, which is of the whole tensor",
        }
    }
}
