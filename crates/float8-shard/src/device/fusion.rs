//! Collectives of `Fusion<B>`: the collectives of `B`, launched immediately.
//!
//! Fusion defers its operations, but ranks must launch the same collectives in the same order. So
//! the stream is drained before each collective, without waiting for the device.
use crate::comm::{Communicator, Operation};
use crate::error::ShardError;
use burn_backend::TensorMetadata;
use burn_backend::tensor::{Device, FloatTensor};
use burn_float8::backend::{DeviceOperand, Float8Backend};
use burn_float8::shard_hooks::{Exchange, resolved};
use burn_fusion::stream::OperationStreams;
use burn_fusion::{Client, Fusion, FusionBackend, FusionTensor, NoOp, get_client};
use burn_ir::{InitOperationIr, OperationIr};

use crate::backend::ShardBackend;
use crate::collectives::{DeviceCollectives, PendingOnDevice, Shards};

struct Fused<B: FusionBackend> {
    inner: Box<dyn DeviceCollectives<B>>,
    client: Client<B::FusionRuntime>,
}

impl<B: FusionBackend + ShardBackend + Float8Backend<Operand = DeviceOperand<B>>> ShardBackend for Fusion<B> {
    fn collectives(device: &Device<Self>, comm: &Communicator) -> Option<Box<dyn DeviceCollectives<Self>>> {
        let inner = B::collectives(device, comm)?;
        Some(Box::new(Fused { inner, client: get_client::<B>(device) }))
    }

    fn cropped(operand: &DeviceOperand<Self>, len: usize, device: &Device<Self>) -> DeviceOperand<Self> {
        wrapped_operand(&get_client::<B>(device), B::cropped(&resolved(operand), len, device))
    }
}

impl<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>> DeviceCollectives<Fusion<B>> for Fused<B> {
    fn start_gather(
        &self,
        label: &str,
        shard: &DeviceOperand<Fusion<B>>,
        shards: Shards,
    ) -> Result<PendingOnDevice<DeviceOperand<Fusion<B>>>, ShardError> {
        let pending = self.inner.start_gather(label, &resolved(shard), shards)?;
        let client = self.client.clone();
        Ok(Box::new(move || Ok(wrapped_operand(&client, pending()?))))
    }

    fn start(
        &self,
        operation: Operation,
        label: &str,
        values: FloatTensor<Fusion<B>>,
    ) -> Result<PendingOnDevice<FloatTensor<Fusion<B>>>, ShardError> {
        let client = self.client.clone();
        let pending = self.inner.start(operation, label, client.resolve_tensor_float::<B>(values))?;
        Ok(Box::new(move || {
            let made = pending()?;
            Ok(wrapped::<B>(&client, made.shape(), made.dtype(), B::float_tensor_handle(made)))
        }))
    }

    fn all_to_all(
        &self,
        label: &str,
        rows: FloatTensor<Fusion<B>>,
        exchange: &Exchange,
    ) -> Result<FloatTensor<Fusion<B>>, ShardError> {
        let made = self.inner.all_to_all(label, self.client.clone().resolve_tensor_float::<B>(rows), exchange)?;
        Ok(wrapped::<B>(&self.client, made.shape(), made.dtype(), B::float_tensor_handle(made)))
    }
}

/// Wraps an existing operand for fusion.
fn wrapped_operand<B: FusionBackend>(
    client: &Client<B::FusionRuntime>,
    operand: DeviceOperand<B>,
) -> DeviceOperand<Fusion<B>> {
    let DeviceOperand { codes, inv_scale, layout } = operand;
    let (shape, dtype) = (codes.shape(), codes.dtype());
    let codes = wrapped::<B>(client, shape, dtype, B::int_tensor_handle(codes));
    let (shape, dtype) = (inv_scale.shape(), inv_scale.dtype());
    let inv_scale = wrapped::<B>(client, shape, dtype, B::float_tensor_handle(inv_scale));
    DeviceOperand { codes, inv_scale, layout }
}

/// Wraps an existing tensor for fusion.
fn wrapped<B: FusionBackend>(
    client: &Client<B::FusionRuntime>,
    shape: burn_std::Shape,
    dtype: burn_backend::DType,
    handle: B::Handle,
) -> FusionTensor<B::FusionRuntime> {
    let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    client.register(OperationStreams::default(), OperationIr::Init(init), NoOp::<B>::new()).remove(0)
}
