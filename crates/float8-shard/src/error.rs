//! [`ShardError`]: why a model cannot be sharded.
use burn::tensor::DType;

use burn_float8::ApplyError;

/// What [`Sharded::apply`](crate::Sharded::apply) can refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// It is sharded already.
    #[error("{name} is sharded already")]
    Sharded {
        /// The parameter.
        name: String,
    },
    /// Its `Tensor::matmul` runs in FP8, which reads no sharded weight.
    #[error("{name} is configured with `matmul`, and Tensor::matmul reads no sharded weight")]
    Matmul {
        /// The linear.
        name: String,
    },
    /// There is no linear and no embedding.
    #[error("the model has no linear and no embedding, so there is nothing to shard")]
    NothingToShard,
    /// A quantized parameter.
    #[error("{name} is quantized: only float parameters are sharded")]
    Quantized {
        /// The parameter.
        name: String,
    },
    /// A weight without high-precision values.
    #[error("{name} is FP8 codes alone, of which no rank has some rows: keep its values, or train on one rank")]
    Fp8Only {
        /// The linear.
        name: String,
    },
    /// A dtype that is not exchanged.
    #[error("{name} is of {dtype:?}: parameters of f32, f16 and bf16 are sharded")]
    Dtype {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// What is loaded into a sharded parameter is neither the whole nor this rank's rows.
    #[error("{name}: {got:?} was loaded, where the whole is {whole:?} and the rows of each of {ranks} ranks {rows:?}")]
    Shape {
        /// The parameter.
        name: String,
        /// What was loaded.
        got: Vec<usize>,
        /// The shape of the whole.
        whole: [usize; 2],
        /// The shape of a shard.
        rows: [usize; 2],
        /// Ranks.
        ranks: usize,
    },
    /// Ranks that NCCL alone connects.
    #[error(
        "a sharded model needs MPI beside NCCL, to compare what its ranks do and to save it: start them with mpirun, in a build of \
         float8-comm with the feature \"mpi\""
    )]
    NeedsMpi,
    /// NCCL does not connect the device that has the model.
    #[error(
        "the ranks' communicator is NCCL's, and the model on {devices} is not on the CUDA device that it connects: give \
         Communicator::from_env_nccl that device, in a build of float8-shard with the feature \"nccl\", or train over MPI with \
         Communicator::from_env"
    )]
    OtherDevice {
        /// The model's devices.
        devices: String,
    },
    /// The ranks do not agree, or cannot be reached.
    #[error("{0}")]
    Collective(String),
}

impl<M> From<ApplyError<M, ShardError>> for ShardError {
    fn from(error: ApplyError<M, ShardError>) -> Self {
        error.error
    }
}
