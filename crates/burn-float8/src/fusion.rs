//! `Fusion<B>`: quantization and the scaled GEMM as custom operations in the stream. Nothing is drained, and the
//! element-wise neighbours still fuse.
use core::marker::PhantomData;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, FloatDType};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{Fusion, FusionBackend, FusionRuntime, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use burn_std::Shape;
use float8_kernels::{Cast, Orientation, row_words};

use crate::backend::{Copies, Float8Backend, GemmPath, HostCodes};
use crate::cube::DeviceOperand;

type Handles<R> = HandleContainer<<R as FusionRuntime>::FusionHandle>;

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

/// Puts an operation into the stream and returns its outputs, which exist once the stream runs it.
fn register<R: FusionRuntime>(
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

impl<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>> Float8Backend for Fusion<B> {
    type Operand = DeviceOperand<Self>;

    fn fp8_supports(device: &Device<Self>, dtype: DType) -> bool {
        B::fp8_supports(device, dtype)
    }

    fn fp8_max_elements() -> u64 {
        B::fp8_max_elements()
    }

    fn fp8_gemm_path(device: &Device<Self>) -> GemmPath {
        B::fp8_gemm_path(device)
    }

    fn fp8_quantize(x: FloatTensor<Self>, cast: Cast, orientation: Orientation) -> Copies<Self::Operand> {
        let cols = x.shape[x.shape.num_dims() - 1];
        let rows = x.shape.num_elements() / cols;
        let codes = |rows, k| (Shape::from(vec![rows, row_words(k)]), DType::U32);
        let mut outputs = vec![];
        outputs.extend(orientation.rows().then(|| codes(rows, cols)));
        outputs.extend(orientation.cols().then(|| codes(cols, rows)));
        outputs.push((Shape::from(vec![1]), DType::F32));
        let mut made = register("float8_quantize", vec![x], outputs, move |ir, handles| {
            let copies = B::fp8_quantize(handles.get_float_tensor::<B>(&ir.inputs[0]), cast, orientation);
            let mut outputs = ir.outputs.iter();
            let mut next = || &outputs.next().expect("one output for each orientation, and the scale").id;
            let mut inv_scale = None;
            for operand in [copies.rows, copies.cols].into_iter().flatten() {
                handles.register_int_tensor::<B>(next(), operand.codes);
                inv_scale = Some(operand.inv_scale);
            }
            handles.register_float_tensor::<B>(next(), inv_scale.expect("at least one orientation"));
        })
        .into_iter();
        let mut next = || made.next().expect("one tensor for each output");
        let (row_codes, col_codes) = (orientation.rows().then(&mut next), orientation.cols().then(&mut next));
        let inv_scale = next();
        let operand = |codes, k| DeviceOperand {
            codes,
            inv_scale: inv_scale.clone(),
            k,
            format: cast.format,
            granularity: cast.granularity,
        };
        Copies { rows: row_codes.map(|c| operand(c, cols)), cols: col_codes.map(|c| operand(c, rows)) }
    }

    fn fp8_matmul(
        a: &Self::Operand,
        b: &Self::Operand,
        bias: Option<FloatTensor<Self>>,
        shape: Shape,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let mut inputs = vec![a.codes.clone(), b.codes.clone(), a.inv_scale.clone(), b.inv_scale.clone()];
        inputs.extend(bias);
        let describe = |o: &Self::Operand| (o.k, o.format, o.granularity);
        let (a, b) = (describe(a), describe(b));
        register("float8_matmul", inputs, vec![(shape, dtype.into())], move |ir, handles| {
            let [codes_a, codes_b, inv_a, inv_b, bias @ ..] = &ir.inputs[..] else {
                unreachable!("registered with four inputs and perhaps a bias")
            };
            let mut operand = |codes, inv_scale, (k, format, granularity)| DeviceOperand::<B> {
                codes: handles.get_int_tensor::<B>(codes),
                inv_scale: handles.get_float_tensor::<B>(inv_scale),
                k,
                format,
                granularity,
            };
            let (a, b) = (operand(codes_a, inv_a, a), operand(codes_b, inv_b, b));
            let bias = bias.first().map(|bias| handles.get_float_tensor::<B>(bias));
            let y = &ir.outputs[0];
            let product = B::fp8_matmul(&a, &b, bias, y.shape.clone(), dtype);
            handles.register_float_tensor::<B>(&y.id, product);
        })
        .remove(0)
    }

    fn fp8_read(operand: &Self::Operand) -> HostCodes {
        let client = operand.codes.client.clone();
        let DeviceOperand { codes, inv_scale, k, format, granularity } = operand.clone();
        B::fp8_read(&DeviceOperand {
            codes: client.resolve_tensor_int::<B>(codes),
            inv_scale: client.resolve_tensor_float::<B>(inv_scale),
            k,
            format,
            granularity,
        })
    }
}
