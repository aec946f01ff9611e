//! `Fusion<B>`: quantization and the scaled GEMM as custom operations in the stream. The stream is
//! not drained, and adjacent element-wise operations still fuse.
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, DeviceOps};
use burn_fusion::{Fusion, FusionBackend};
use burn_ir::TensorIr;
use burn_std::Shape;
use float8_kernels::{Cast, Orientation, health_len, row_words};

use super::cube::write_codes;
use super::host::matrix;
use super::operand::{DeviceOperand, OperandLayout, scales};
use super::stream::{Handles, register};
use super::{
    AdamWDtypes, AdamWFn, DeviceFacts, DeviceMemory, Float8Backend, Fused, FusedBackward, GemmRequest, GivenAmax,
    GroupEnds, HighPrecisionGemm, HostCodes, OperandSize, Quantized, SelfCheckReport, adamw_kernels, device_errors,
    fused, fusion_fused_ops, high_precision,
};
use crate::config::SelfCheck;
use crate::error::Float8Error;

impl<B: FusionBackend + Float8Backend<Operand = DeviceOperand<B>>> Float8Backend for Fusion<B> {
    type Operand = DeviceOperand<Self>;

    fn fp8_facts(device: &Device<Self>) -> DeviceFacts {
        B::fp8_facts(device)
    }

    fn fp8_device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        B::fp8_device_memory(device)
    }

    fn fp8_prepare(device: &Device<Self>, self_check: Option<SelfCheck>) -> Result<(), Float8Error> {
        B::fp8_prepare(device, self_check)
    }

    fn fp8_self_check(device: &Device<Self>, wait: bool) -> SelfCheckReport {
        // Runs pending operations of the stream first.
        if wait && let Err(error) = Self::sync(device) {
            device_errors::push_reported(device.id(), error);
        }
        B::fp8_self_check(device, wait)
    }

    fn fp8_quantize(
        x: FloatTensor<Self>,
        cast: Cast,
        orientation: Orientation,
        given: Option<GivenAmax<FloatTensor<Self>>>,
    ) -> Quantized<Self> {
        let [rows, cols] = matrix(&x.shape);
        let Cast { format, granularity, scale_mode } = cast;
        let layout = OperandLayout { k: cols, format, granularity, power_of_two: scale_mode.is_power_of_two() };
        // Codes and scales of each copy, then the amax unless it is the given one.
        let sides: Vec<_> = [(orientation.rows(), [rows, cols]), (orientation.cols(), [cols, rows])]
            .into_iter()
            .filter_map(|(wanted, dims)| wanted.then_some(dims))
            .collect();
        let mut outputs = vec![];
        for [rows, k] in &sides {
            outputs.push((Shape::from(vec![*rows, row_words(*k)]), DType::U32));
            outputs.push(scales(granularity, *rows, *k));
        }
        let observe = given.as_ref().is_none_or(|given| given.observe);
        let given = given.map(|given| given.amax);
        if observe {
            outputs.push((Shape::from(vec![granularity.amax_len(rows, cols, orientation)]), DType::F32));
        }
        let inputs = core::iter::once(x).chain(given.clone()).collect();
        let mut made = register("float8_quantize", inputs, outputs, move |ir, handles| {
            let mut inputs: Vec<_> = ir.inputs.iter().map(|input| handles.get_float_tensor::<B>(input)).collect();
            let given = inputs.split_off(1).pop().map(|amax| GivenAmax { amax, observe });
            let copies = B::fp8_quantize(inputs.remove(0), cast, orientation, given);
            let mut outputs = ir.outputs.iter();
            let mut next = || &outputs.next().expect("two outputs for each orientation, and the amax").id;
            for operand in [copies.rows, copies.cols].into_iter().flatten() {
                handles.register_int_tensor::<B>(next(), operand.codes);
                handles.register_float_tensor::<B>(next(), operand.inv_scale);
            }
            if observe {
                handles.register_float_tensor::<B>(next(), copies.amax);
            }
        })
        .into_iter();
        let mut next = || made.next().expect("one tensor for each output");
        let mut copy = |wanted: bool, k| {
            wanted.then(|| DeviceOperand { codes: next(), inv_scale: next(), layout: OperandLayout { k, ..layout } })
        };
        let (row_copy, col_copy) = (copy(orientation.rows(), cols), copy(orientation.cols(), rows));
        let amax = if observe { next() } else { given.expect("nothing is observed only where an amax is given") };
        Quantized { rows: row_copy, cols: col_copy, amax }
    }

    fn fp8_matmul(gemm: GemmRequest<'_, Self>) -> FloatTensor<Self> {
        let GemmRequest { a, b, bias, groups, shape, dtype, config } = gemm;
        let mut inputs = [a.tensors(), b.tensors()].concat();
        let (has_bias, grouping) = (bias.is_some(), groups.as_ref().map(|groups| groups.grouping));
        inputs.extend(bias);
        inputs.extend(groups.map(|groups| groups.ends));
        let (a, b) = (a.layout, b.layout);
        register("float8_matmul", inputs, vec![(shape, dtype.into())], move |ir, handles| {
            let (a, b) = (&resolve(a, &ir.inputs[..2], handles), &resolve(b, &ir.inputs[2..4], handles));
            let mut rest = ir.inputs[4..].iter();
            let bias = has_bias.then(|| handles.get_float_tensor::<B>(rest.next().expect("registered with a bias")));
            let groups = grouping.map(|grouping| {
                let ends = handles.get_int_tensor::<B>(rest.next().expect("registered with ends"));
                GroupEnds { ends, grouping }
            });
            let y = &ir.outputs[0];
            let shape = y.shape.clone();
            let product = B::fp8_matmul(GemmRequest { a, b, bias, groups, shape, dtype, config });
            handles.register_float_tensor::<B>(&y.id, product);
        })
        .remove(0)
    }

    fn high_precision_matmul(gemm: HighPrecisionGemm<FloatTensor<Self>>) -> FloatTensor<Self> {
        if gemm.kernel(|| B::fp8_facts(gemm.a.client.device())).is_none() {
            return high_precision::compute::<Self>(gemm);
        }
        let outputs = vec![(gemm.shape(), gemm.dtype)];
        let HighPrecisionGemm { gemm, a, b, bias, dtype } = gemm;
        let inputs = [a, b].into_iter().chain(bias).collect();
        register("float8_high_precision_matmul", inputs, outputs, move |ir, handles| {
            let mut inputs = ir.inputs.iter().map(|input| handles.get_float_tensor::<B>(input));
            let mut next = || inputs.next().expect("registered with two operands");
            let (a, b) = (next(), next());
            let bias = inputs.next();
            let y = B::high_precision_matmul(HighPrecisionGemm { gemm, a, b, bias, dtype });
            handles.register_float_tensor::<B>(&ir.outputs[0].id, y);
        })
        .remove(0)
    }

    fn fp8_health(x: FloatTensor<Self>, operand: &Self::Operand, transposed: bool) -> FloatTensor<Self> {
        let mut dims = matrix(&x.shape);
        if transposed {
            dims.reverse();
        }
        let output = (Shape::from(vec![health_len(dims[0], dims[1]), 5]), DType::F32);
        let (inputs, layout) = ([vec![x], operand.tensors()].concat(), operand.layout);
        register("float8_health", inputs, vec![output], move |ir, handles| {
            let x = handles.get_float_tensor::<B>(&ir.inputs[0]);
            let operand = resolve(layout, &ir.inputs[1..], handles);
            handles.register_float_tensor::<B>(&ir.outputs[0].id, B::fp8_health(x, &operand, transposed));
        })
        .remove(0)
    }

    fn fused(
        op: &Fused<Self>,
        inputs: &[FloatTensor<Self>],
        backward: Option<&FusedBackward<'_, Self>>,
    ) -> Vec<FloatTensor<Self>> {
        let made = match (op, inputs) {
            (Fused::Attention(attention), [q, k, v]) => fusion_fused_ops::attention(attention, [q, k, v], backward),
            _ => fusion_fused_ops::compute(op, inputs, backward.map(|backward| backward.dy)),
        };
        made.unwrap_or_else(|| fused::compute(op, inputs, backward))
    }

    fn adamw(device: &Device<Self>, dtypes: AdamWDtypes) -> Option<AdamWFn<Self>> {
        B::adamw(device, dtypes).map(|_| adamw_kernels::run_fused as _)
    }

    fn fp8_size(operand: &Self::Operand) -> OperandSize {
        operand.size()
    }

    fn fp8_dequantize(operand: &Self::Operand) -> FloatTensor<Self> {
        let layout = operand.layout;
        let output = (Shape::from(vec![operand.codes.shape[0], layout.k]), DType::F32);
        register("float8_dequantize", operand.tensors(), vec![output], move |ir, handles| {
            let operand = resolve(layout, &ir.inputs, handles);
            handles.register_float_tensor::<B>(&ir.outputs[0].id, B::fp8_dequantize(&operand));
        })
        .remove(0)
    }

    fn fp8_transpose(operand: &Self::Operand) -> Self::Operand {
        let (rows, layout @ OperandLayout { k, granularity, .. }) = (operand.codes.shape[0], operand.layout);
        let outputs = vec![(Shape::from(vec![k, row_words(rows)]), DType::U32), scales(granularity, k, rows)];
        let mut made = register("float8_transpose", operand.tensors(), outputs, move |ir, handles| {
            let made = B::fp8_transpose(&resolve(layout, &ir.inputs, handles));
            handles.register_int_tensor::<B>(&ir.outputs[0].id, made.codes);
            handles.register_float_tensor::<B>(&ir.outputs[1].id, made.inv_scale);
        })
        .into_iter();
        let mut next = || made.next().expect("codes and scales");
        DeviceOperand { codes: next(), inv_scale: next(), layout: OperandLayout { k: rows, ..layout } }
    }

    fn fp8_write(codes: HostCodes, device: &Device<Self>) -> Self::Operand {
        write_codes(codes, device)
    }

    fn fp8_read(operand: &Self::Operand) -> HostCodes {
        B::fp8_read(&resolved(operand))
    }
}

/// The operand below fusion, after pending operations are submitted. Does not wait for the device.
pub fn resolved<B: FusionBackend>(operand: &DeviceOperand<Fusion<B>>) -> DeviceOperand<B> {
    let client = operand.codes.client.clone();
    let DeviceOperand { codes, inv_scale, layout } = operand.clone();
    let codes = client.resolve_tensor_int::<B>(codes);
    DeviceOperand { codes, inv_scale: client.resolve_tensor_float::<B>(inv_scale), layout }
}

/// The operand of an operation whose first inputs are its tensors.
fn resolve<B: FusionBackend>(
    layout: OperandLayout,
    inputs: &[TensorIr],
    handles: &mut Handles<B::FusionRuntime>,
) -> DeviceOperand<B> {
    let codes = handles.get_int_tensor::<B>(&inputs[0]);
    let inv_scale = handles.get_float_tensor::<B>(&inputs[1]);
    DeviceOperand { codes, inv_scale, layout }
}
