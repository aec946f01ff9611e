//! Collectives on the memory of CubeCL devices.
mod cube;
mod fusion;
mod joined;
#[cfg(feature = "nccl")]
mod nccl;
mod staged;

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_float8::shard_hooks::Exchange;
pub use staged::stage_collectives;

/// Exchange of the words of rows.
fn words_of<R: CubeRuntime>(rows: &CubeTensor<R>, exchange: &Exchange) -> Exchange {
    exchange.of_groups(rows.meta.shape[1] * rows.dtype.size() / 4)
}
