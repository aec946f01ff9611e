//! [`DeviceCollectives`]: collectives on device memory, without the host.
use crate::comm::Operation;
use crate::error::ShardError;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::Exchange;
use float8_kernels::Granularity;

/// Result of a started collective. Calling it makes the device wait, not the host; until then the
/// device may do other work. If it is dropped, the collective still completes.
pub type PendingOnDevice<T> = Box<dyn FnOnce() -> Result<T, ShardError> + Send>;

/// Collectives on the memory of this rank's device. All ranks call the same ones in the same order.
/// The host does not wait for them.
pub trait DeviceCollectives<B: Float8Backend> {
    /// Gathers the operand of a whole matrix from each rank's `shard`, all cast with the scales of
    /// the whole matrix. Work launched before the result is requested overlaps the transfer.
    ///
    /// # Errors
    /// [`ShardError`].
    fn start_gather(
        &self,
        label: &str,
        shard: &B::Operand,
        shards: Shards,
    ) -> Result<PendingOnDevice<B::Operand>, ShardError>;

    /// Starts a collective of these, which sum in the dtype of the values:
    ///
    /// ```text
    /// AllGather           [rows, N] of each rank, a multiple of 4 bytes → [ranks · rows, N]
    /// ReduceScatterSum    [ranks · rows, N], f32 or bf16 → [rows, N]
    /// AllReduceSum        [n] in f32
    /// AllReduceMaxBits    [n] in f32, not negative; NaN wins
    /// ```
    /// Work launched before the result is requested overlaps the transfer.
    ///
    /// # Errors
    /// [`ShardError`].
    fn start(
        &self,
        operation: Operation,
        label: &str,
        values: FloatTensor<B>,
    ) -> Result<PendingOnDevice<FloatTensor<B>>, ShardError>;

    /// Exchanges rows `[.., C]` of whole words, which begin with the rows for rank 0: `[M, C]` from all
    /// ranks, rank 0's first. One row of zeros, if there are none.
    ///
    /// # Errors
    /// [`ShardError`].
    fn all_to_all(&self, label: &str, rows: FloatTensor<B>, exchange: &Exchange) -> Result<FloatTensor<B>, ShardError>;
}

/// Partition of a whole matrix's operand over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    /// The sharded axis.
    pub axis: ShardedAxis,
    /// Length of the axis on each rank: a multiple of 16, or of 128 for scales of blocks. A longer
    /// shard is cropped.
    pub chunk: usize,
    /// Length of the axis in the whole operand. Entries beyond it on the last ranks are zeros.
    pub len: usize,
}

/// Axis of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardedAxis {
    /// Shards are concatenated along the rows.
    Rows,
    /// Shards are concatenated along the axis that a GEMM contracts.
    Contraction,
}

impl ShardedAxis {
    /// Axis of the operand `[N, K]` or `[K, N]` that corresponds to dim 0 of the weight `[K, N]`.
    pub(crate) fn of(is_transposed: bool) -> Self {
        if is_transposed { Self::Contraction } else { Self::Rows }
    }

    /// Whether every rank has the same scales: the scale of the whole tensor, or the scales of rows
    /// that are split between the ranks.
    pub fn shares_scales(self, granularity: Granularity) -> bool {
        match granularity {
            Granularity::Tensor => true,
            Granularity::Row => self == Self::Contraction,
            _ => false,
        }
    }
}
