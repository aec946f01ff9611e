//! [`DeviceCollectives`]: what ranks exchange without the host, where a backend's device can.
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use float8_comm::CommError;
use float8_kernels::Granularity;

/// A collective that was started. The device may do other work until this is called, and what is called is a wait of the device, not of
/// the host. Dropped, the collective goes on to its end.
pub type PendingOnDevice<T> = Box<dyn FnOnce() -> Result<T, CommError> + Send>;

/// Collectives on the memory of this rank's device: all ranks call the same ones in the same order. The host waits for none of them.
pub trait DeviceCollectives<B: Float8Backend> {
    /// Gathers the operand of a whole matrix from each rank's `shard`, all cast with the scales that the whole has. What the device is
    /// given before the result is asked for runs beside the transfer.
    ///
    /// # Errors
    /// [`CommError`].
    fn start_gather(
        &self,
        label: &str,
        shard: &B::Operand,
        shards: Shards,
    ) -> Result<PendingOnDevice<B::Operand>, CommError>;

    /// `[rows, N]` of each rank, one below the other: `[ranks · rows, N]`, in their dtype. The bytes of a shard are a multiple of four.
    ///
    /// # Errors
    /// [`CommError`].
    fn gather(&self, label: &str, shard: FloatTensor<B>) -> Result<FloatTensor<B>, CommError>;

    /// The sums over all ranks of `[ranks · rows, N]`, of which each keeps its `[rows, N]`; in f32 or bf16, in which they are added.
    ///
    /// # Errors
    /// [`CommError`].
    fn reduce_scatter_sum(&self, label: &str, all: FloatTensor<B>) -> Result<FloatTensor<B>, CommError>;

    /// The sums over all ranks, in f32.
    ///
    /// # Errors
    /// [`CommError`].
    fn all_reduce_sum(&self, label: &str, values: FloatTensor<B>) -> Result<FloatTensor<B>, CommError>;

    /// The largest of every rank's f32, none of which is negative: NaN wins.
    ///
    /// # Errors
    /// [`CommError`].
    fn all_reduce_max(&self, label: &str, values: FloatTensor<B>) -> Result<FloatTensor<B>, CommError>;
}

/// How the operand of a whole matrix is dealt to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    /// Which of its axes is divided.
    pub axis: ShardedAxis,
    /// Its length on each rank: a multiple of 16, for scales of blocks of 128. A shard that is longer has its end left out.
    pub chunk: usize,
    /// Its length in the whole; what the last ranks have beyond it are zeros.
    pub len: usize,
}

/// An axis of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardedAxis {
    /// Shards lie one below the other.
    Rows,
    /// Shards lie side by side along the axis that a GEMM contracts.
    Contraction,
}

impl ShardedAxis {
    /// The axis of the operand `[N, K]` or `[K, N]` which ranks divide when they divide dim 0 of a weight `[K, N]`.
    pub(crate) fn of(is_transposed: bool) -> Self {
        if is_transposed { Self::Contraction } else { Self::Rows }
    }

    /// Whether every rank has the same scales: the tensor's one, or those of rows of which each rank has a part.
    pub fn shares_scales(self, granularity: Granularity) -> bool {
        match granularity {
            Granularity::Tensor => true,
            Granularity::Row => self == Self::Contraction,
            _ => false,
        }
    }
}
