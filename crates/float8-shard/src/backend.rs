//! [`ShardBackend`]: what a backend offers beyond FP8 so that models on it can be sharded.
use burn_backend::tensor::Device;
use burn_float8::backend::Float8Backend;
use float8_comm::Communicator;

use crate::collectives::DeviceCollectives;

/// A backend on which models can be sharded.
///
/// Implemented for `CubeBackend` and `Fusion<CubeBackend>` (feature `cubecl`), `Flex` and `NdArray` (features of their names). For a
/// backend of your own, `impl ShardBackend for Own {}` is enough: ranks then exchange the memory of their hosts.
#[diagnostic::on_unimplemented(
    message = "models on `{Self}` cannot be sharded",
    note = "turn on the feature `flex`, `ndarray` or `cubecl` of float8-shard, or write `impl ShardBackend for` a backend of your own"
)]
pub trait ShardBackend: Float8Backend {
    /// The collectives of `comm` on the memory of this device, if it has some.
    fn collectives(device: &Device<Self>, comm: &Communicator) -> Option<Box<dyn DeviceCollectives<Self>>> {
        let _ = (device, comm);
        None
    }
}

#[cfg(feature = "flex")]
impl ShardBackend for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl ShardBackend for burn::backend::NdArray {}
