//! CubeCL backends: NCCL between CUDA devices; other devices exchange over the host.
use crate::comm::Communicator;
use burn_backend::tensor::Device;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_float8::backend::{DeviceOperand, OperandLayout};

#[cfg(feature = "nccl")]
use super::nccl;
use super::{joined, staged};
use crate::backend::ShardBackend;
use crate::collectives::DeviceCollectives;

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> ShardBackend for CubeBackend<R, F, I, BT> {
    #[cfg_attr(not(feature = "nccl"), allow(unused_variables))]
    fn collectives(device: &Device<Self>, comm: &Communicator) -> Option<Box<dyn DeviceCollectives<Self>>> {
        #[cfg(feature = "nccl")]
        if let Some(nccl) = nccl::collectives::<R, Self>(device, comm) {
            return Some(nccl);
        }
        staged::collectives::<R, Self>(comm)
    }

    fn cropped(operand: &DeviceOperand<Self>, k: usize, _: &Device<Self>) -> DeviceOperand<Self> {
        let DeviceOperand { codes, inv_scale, layout } = operand.clone();
        DeviceOperand { codes: joined::first(codes, k), inv_scale, layout: OperandLayout { k, ..layout } }
    }
}
