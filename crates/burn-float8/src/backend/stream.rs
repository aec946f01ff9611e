//! Custom operations in the stream of `Fusion<B>`.
use core::marker::PhantomData;

use burn_backend::DType;
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{FusionRuntime, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use burn_std::Shape;

pub(super) type Handles<R> = HandleContainer<<R as FusionRuntime>::FusionHandle>;

/// A custom operation: its description and the closure that runs it.
struct Op<R, F> {
    ir: CustomOpIr,
    run: F,
    runtime: PhantomData<fn(R)>,
}

impl<R, F> core::fmt::Debug for Op<R, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.ir.id)
    }
}

impl<R: FusionRuntime, F: Fn(&CustomOpIr, &mut Handles<R>) + Send + Sync> Operation<R> for Op<R, F> {
    fn execute(&self, handles: &mut Handles<R>) {
        (self.run)(&self.ir, handles)
    }
}

/// Adds an operation to the stream and returns its outputs. They exist once the stream runs it.
pub(super) fn register<R: FusionRuntime>(
    name: &'static str,
    inputs: Vec<FusionTensor<R>>,
    outputs: Vec<(Shape, DType)>,
    run: impl Fn(&CustomOpIr, &mut Handles<R>) + Send + Sync + 'static,
) -> Vec<FusionTensor<R>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(&inputs);
    let outputs: Vec<_> = outputs
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let ir = CustomOpIr::new(name, &inputs, &outputs);
    let op = Op { ir: ir.clone(), run, runtime: PhantomData };
    client.register(streams, OperationIr::Custom(ir), op)
}
