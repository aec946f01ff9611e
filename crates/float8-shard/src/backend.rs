//! [`ShardBackend`]: backend trait for sharded models.
use crate::comm::Communicator;
use burn_backend::tensor::Device;
use burn_float8::backend::{Float8Backend, HostCodes};

use crate::collectives::DeviceCollectives;

/// Backend on which models can be sharded.
///
/// Implemented for `CubeBackend` and `Fusion<CubeBackend>` (feature `cubecl`), `Flex` and `NdArray`
/// (features of the same name). For a custom backend `impl ShardBackend for Own {}` is enough:
/// ranks then exchange host memory.
#[diagnostic::on_unimplemented(
    message = "models on `{Self}` cannot be sharded",
    note = "turn on the feature `flex`, `ndarray` or `cubecl` of float8-shard, or write `impl ShardBackend for` a backend of your own"
)]
pub trait ShardBackend: Float8Backend {
    /// Collectives of `comm` on the memory of this device. None if unsupported.
    fn collectives(device: &Device<Self>, comm: &Communicator) -> Option<Box<dyn DeviceCollectives<Self>>> {
        let _ = (device, comm);
        None
    }

    /// First `len` elements of each row's contraction, for an operand with scales of rows. By default codes
    /// pass through the host.
    fn cropped(operand: &Self::Operand, len: usize, device: &Device<Self>) -> Self::Operand {
        let own = Self::fp8_read(operand);
        let [rows, k] = own.dims;
        let codes = own.codes.chunks_exact(k).flat_map(|row| &row[..len]).copied().collect();
        Self::fp8_write(HostCodes { codes, dims: [rows, len], ..own }, device)
    }
}

#[cfg(feature = "flex")]
impl ShardBackend for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl ShardBackend for burn::backend::NdArray {}
