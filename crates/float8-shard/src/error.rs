//! [`ShardError`]: reasons why a model cannot be sharded.
use burn::tensor::DType;

use burn_float8::ApplyError;

/// Error of [`Sharded::apply`](crate::Sharded::apply).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The model is already sharded.
    #[error("{name} is sharded already")]
    Sharded {
        /// The parameter.
        name: String,
    },
    /// The layer's `Tensor::matmul` runs in FP8, which does not support sharded weights.
    #[error("{name} is configured with `matmul`, and Tensor::matmul reads no sharded weight")]
    Matmul {
        /// The linear.
        name: String,
    },
    /// The model has no linear and no embedding.
    #[error("the model has no linear and no embedding, so there is nothing to shard")]
    NothingToShard,
    /// The parameter is quantized.
    #[error("{name} is quantized: only float parameters are sharded")]
    Quantized {
        /// The parameter.
        name: String,
    },
    /// The weight has no high-precision values.
    #[error("{name} is FP8-only, and such weights are not sharded: keep its values, or train on one rank")]
    Fp8Only {
        /// The linear.
        name: String,
    },
    /// Ranks do not exchange this dtype.
    #[error("{name} is of {dtype:?}: parameters of f32, f16 and bf16 are sharded")]
    Dtype {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// The loaded value has neither the shape of the whole parameter nor of this rank's rows.
    #[error("{name}: {got:?} was loaded, where the whole is {whole:?} and the rows of each of {ranks} ranks {rows:?}")]
    Shape {
        /// The parameter.
        name: String,
        /// Loaded shape.
        got: Vec<usize>,
        /// Shape of the whole parameter.
        whole: [usize; 2],
        /// Shape of a shard.
        rows: [usize; 2],
        /// Number of ranks.
        ranks: usize,
    },
    /// Only NCCL connects the ranks.
    #[error(
        "a sharded model needs MPI beside NCCL, to compare what its ranks do and to save it: start them with mpirun, in a build of \
         float8-comm with the feature \"mpi\""
    )]
    NeedsMpi,
    /// NCCL does not connect the model's device.
    #[error(
        "the ranks' communicator is NCCL's, and the model on {devices} is not on the CUDA device that it connects: give \
         Communicator::from_env_nccl that device, in a build of float8-shard with the feature \"nccl\", or train over MPI with \
         Communicator::from_env"
    )]
    OtherDevice {
        /// Devices of the model.
        devices: String,
    },
    /// The ranks differ or cannot communicate.
    #[error("{0}")]
    Collective(String),
}

impl<M> From<ApplyError<M, ShardError>> for ShardError {
    fn from(error: ApplyError<M, ShardError>) -> Self {
        error.error
    }
}
