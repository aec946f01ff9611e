//! CubeCL backends without fusion: runs the kernels of `float8-kernels` on Burn's tensors.
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, FloatDType, TensorData, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::Shape;
use cubecl::client::ComputeClient;
use cubecl::device::Device as _;
use cubecl::future::block_on;
use float8_kernels::check::CastVariant;
use float8_kernels::{
    Cast, GemmArgs, GemmDevice, Groups, InvScale, KernelError, MAX_INDEX, Operand, Orientation, dequantize_to_f32,
    health, health_len, mx, quantize, quantize_with_amax, row_words, supports, transpose,
};

use super::operand::{DeviceOperand, OperandLayout, read_scales, scales, tensor};
use super::views::{matrix_view, vector_view};
use super::{
    AdamWDtypes, AdamWFn, DeviceFacts, DeviceMemory, Float8Backend, Fused, FusedBackward, GemmRequest, GivenAmax,
    GroupEnds, HighPrecisionGemm, HostCodes, OperandSize, Quantized, SelfCheckReport, adamw_kernels, attention_kernels,
    device_errors, fused, fused_kernels, high_precision, high_precision_kernels, host, preflight, self_check,
};
use crate::config::SelfCheck;
use crate::error::Float8Error;

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> Float8Backend for CubeBackend<R, F, I, BT> {
    type Operand = DeviceOperand<Self>;

    fn fp8_facts(device: &Device<Self>) -> DeviceFacts {
        let client = R::client(device);
        let facts = DeviceFacts::new(|dtype| supports(&client, dtype.into()));
        let attention = attention_kernels::path(&client);
        DeviceFacts { max_elements: MAX_INDEX, attention, gemm: Some(GemmDevice::of(&client)), ..facts }
    }

    fn fp8_device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        let usage = R::client(device).memory_usage().ok()?;
        Some(DeviceMemory { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }

    fn fp8_prepare(device: &Device<Self>, self_check: Option<SelfCheck>) -> Result<(), Float8Error> {
        preflight::setup::<R>()?;
        let client = R::client(device);
        let checks = self_check::of(&client, device.to_id());
        checks.set(self_check)?;
        checks.prepared(|| preflight::run(&client, &checks))
    }

    fn fp8_self_check(device: &Device<Self>, wait: bool) -> SelfCheckReport {
        if !wait && self_check::is_faultless() {
            return SelfCheckReport::default();
        }
        let client = R::client(device);
        if wait && let Err(error) = block_on(client.sync()) {
            device_errors::push_reported(device.to_id(), error);
        }
        self_check::of(&client, device.to_id()).report()
    }

    fn fp8_quantize(
        x: CubeTensor<R>,
        cast: Cast,
        orientation: Orientation,
        given: Option<GivenAmax<CubeTensor<R>>>,
    ) -> Quantized<Self> {
        let (client, device) = (x.client.clone(), x.device.clone());
        let view = matrix_view(x.clone());
        let [rows, cols] = view.shape;
        let observe = given.as_ref().map(|given| given.observe);
        let variant = || CastVariant::of(&client, &view, cast, orientation, observe);
        let judged = self_check::of(&client, device.to_id()).cast(&client, variant);
        let quantized = judged.and_then(|()| match &given {
            None => quantize(&client, &view, cast, orientation),
            Some(GivenAmax { amax, observe }) => {
                quantize_with_amax(&client, &view, &amax.handle, *observe, cast, orientation)
            }
        });
        let quantized = match quantized {
            Err(KernelError::Disabled) => return quantize_on_host(x, cast, orientation, given),
            quantized => quantized.expect("the caller checked dtype, shape and granularity"),
        };
        let given = given.filter(|given| !given.observe).map(|given| given.amax);
        let operand = |operand: Operand| device_operand(&client, &device, operand);
        let observed = |amax| {
            let len = cast.granularity.amax_len(rows, cols, orientation);
            tensor(&client, &device, amax, [len], DType::F32)
        };
        let amax = given.unwrap_or_else(|| observed(quantized.amax));
        Quantized { rows: quantized.rows.map(operand), cols: quantized.cols.map(operand), amax }
    }

    fn fp8_matmul(gemm: GemmRequest<'_, Self>) -> CubeTensor<R> {
        let GemmRequest { a, b, bias, groups, shape, dtype, config } = gemm;
        let (client, device) = (a.codes.client.clone(), a.codes.device.clone());
        let [left, right] = [a, b].map(kernel_operand);
        let bias_view = bias.as_ref().map(vector_view);
        let device_groups = groups.clone().map(|GroupEnds { ends, grouping }| {
            let ends = into_contiguous(ends);
            Groups { count: ends.shape()[0], ends: ends.handle, grouping }
        });
        let args = GemmArgs {
            a: &left,
            b: &right,
            bias: bias_view.as_ref(),
            groups: device_groups.as_ref(),
            dtype: DType::from(dtype).into(),
            config,
        };
        let variant = self_check::of(&client, device.to_id()).gemm(&client, &args.problem(), None);
        match variant.and_then(|variant| args.run(&client, Some(&variant))) {
            Err(KernelError::Disabled) => {
                let [a, b] = [a, b].map(|operand| host::write_codes(Self::fp8_read(operand), &device));
                host::matmul::<Self>([&a, &b], bias, groups, shape, dtype)
            }
            y => tensor(&client, &device, y.expect("the caller checked dtype and shape"), shape, dtype.into()),
        }
    }

    fn high_precision_matmul(gemm: HighPrecisionGemm<CubeTensor<R>>) -> CubeTensor<R> {
        high_precision_kernels::compute(&gemm).unwrap_or_else(|| high_precision::compute::<Self>(gemm))
    }

    fn fp8_health(x: CubeTensor<R>, operand: &Self::Operand, transposed: bool) -> CubeTensor<R> {
        let (client, device) = (x.client.clone(), x.device.clone());
        let view = matrix_view(x);
        let view = if transposed { view.transposed() } else { view };
        let len = health_len(view.shape[0], view.shape[1]);
        let partials = health(&client, &view, &kernel_operand(operand)).expect("the operand was cast from this tensor");
        tensor(&client, &device, partials, [len, 5], DType::F32)
    }

    fn fused(
        op: &Fused<Self>,
        inputs: &[CubeTensor<R>],
        backward: Option<&FusedBackward<'_, Self>>,
    ) -> Vec<CubeTensor<R>> {
        let made = match (op, inputs) {
            (Fused::Attention(attention), [q, k, v]) => attention_kernels::compute(attention, [q, k, v], backward),
            _ => fused_kernels::compute(op, inputs, backward.map(|backward| backward.dy)),
        };
        made.unwrap_or_else(|| fused::compute(op, inputs, backward))
    }

    fn adamw(device: &Device<Self>, dtypes: AdamWDtypes) -> Option<AdamWFn<Self>> {
        adamw_kernels::is_available(&R::client(device), device, dtypes).then_some(adamw_kernels::run as _)
    }

    fn fp8_size(operand: &Self::Operand) -> OperandSize {
        operand.size()
    }

    fn fp8_dequantize(operand: &Self::Operand) -> CubeTensor<R> {
        let (client, device) = (operand.codes.client.clone(), operand.codes.device.clone());
        let shape = Shape::from(vec![operand.codes.shape()[0], operand.layout.k]);
        if shape.num_elements() == 0 {
            return Self::float_empty(shape, &device, FloatDType::F32);
        }
        let values =
            dequantize_to_f32(&client, &kernel_operand(operand)).expect("an operand whose values can be indexed");
        tensor(&client, &device, values, shape, DType::F32)
    }

    fn fp8_transpose(operand: &Self::Operand) -> Self::Operand {
        let (client, device) = (operand.codes.client.clone(), operand.codes.device.clone());
        let made = transpose(&client, &kernel_operand(operand)).expect("the caller checked the scales");
        device_operand(&client, &device, made)
    }

    fn fp8_write(codes: HostCodes, device: &Device<Self>) -> Self::Operand {
        write_codes(codes, device)
    }

    fn fp8_read(operand: &Self::Operand) -> HostCodes {
        let read = |t: &CubeTensor<R>| {
            let t = into_contiguous(t.clone());
            t.client.read_one(t.handle).expect("the device can be read")
        };
        let words = read(&operand.codes);
        let OperandLayout { k, format, granularity, .. } = operand.layout;
        let rows = operand.codes.shape()[0];
        let scales = read(&operand.inv_scale);
        let scales = &scales[..4 * operand.inv_scale.shape().num_elements()];
        let inv_scales = read_scales(scales, granularity, rows, k);
        HostCodes {
            // Little-endian words: their bytes are the codes in order.
            codes: words.chunks_exact(4 * row_words(k)).take(rows).flat_map(|row| &row[..k]).copied().collect(),
            dims: [rows, k],
            format,
            granularity,
            inv_scales,
            transposed: false,
        }
    }
}

/// Cast on the host, used if every kernel of the device is disabled.
fn quantize_on_host<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    x: CubeTensor<R>,
    cast: Cast,
    orientation: Orientation,
    given: Option<GivenAmax<CubeTensor<R>>>,
) -> Quantized<CubeBackend<R, F, I, BT>> {
    let device = x.device.clone();
    let [rows, cols] = host::matrix(&x.shape());
    let is_given = given.as_ref().is_some_and(|given| !given.observe);
    let (copies, amax) = host::quantize::<CubeBackend<R, F, I, BT>>(x, cast, orientation, given);
    let [rows_copy, cols_copy] = copies
        .map(|copy| copy.map(|copy| write_codes(HostCodes { transposed: false, ..host::read_codes(&copy) }, &device)));
    // Same length as the amax of the kernels.
    let len = if is_given { 1 } else { cast.granularity.amax_len(rows, cols, orientation) };
    let amax = <CubeBackend<R, F, I, BT> as FloatTensorOps<_>>::float_expand(amax, Shape::from(vec![len]));
    Quantized { rows: rows_copy, cols: cols_copy, amax: into_contiguous(amax) }
}

/// [`Float8Backend::fp8_write`] for backends whose int and float tensors have one type.
pub(super) fn write_codes<B: Backend<IntTensorPrimitive = FloatTensor<B>>>(
    codes: HostCodes,
    device: &Device<B>,
) -> DeviceOperand<B> {
    let HostCodes { codes, dims: [rows, k], format, granularity, inv_scales, .. } = codes;
    let words = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect::<Vec<_>>();
    let ints = |words: Vec<u32>, shape: Shape| B::int_from_data(TensorData::new(words, shape), device);
    let mut padded = vec![0; rows * 4 * row_words(k)];
    for (row, codes) in padded.chunks_exact_mut((4 * row_words(k)).max(1)).zip(codes.chunks_exact(k.max(1))) {
        row[..k].copy_from_slice(codes);
    }
    let power_of_two = inv_scales.iter().all(|scale| scale.to_e8m0().is_some());
    let (shape, dtype) = scales(granularity, rows, k);
    let inv_scale = match dtype {
        DType::U32 => {
            let [_, blocks] = granularity.scale_dims(rows, k);
            let byte = |scale: InvScale| scale.to_e8m0().expect("scales of blocks of 32 are E8M0");
            ints(words(&mx::to_blocked(&inv_scales.into_iter().map(byte).collect::<Vec<_>>(), rows, blocks)), shape)
        }
        _ => {
            let values: Vec<f32> = inv_scales.into_iter().map(InvScale::get).collect();
            B::float_from_data(TensorData::new(values, shape), device)
        }
    };
    let codes = ints(words(&padded), Shape::from(vec![rows, row_words(k)]));
    DeviceOperand { codes, inv_scale, layout: OperandLayout { k, format, granularity, power_of_two } }
}

/// Wraps a kernel's operand in tensors.
fn device_operand<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    client: &ComputeClient<R>,
    device: &R::Device,
    o: Operand,
) -> DeviceOperand<CubeBackend<R, F, I, BT>> {
    let Operand { codes, inv_scale, rows, k, format, granularity, power_of_two } = o;
    let (shape, dtype) = scales(granularity, rows, k);
    DeviceOperand {
        codes: tensor(client, device, codes, [rows, row_words(k)], DType::U32),
        inv_scale: tensor(client, device, inv_scale, shape, dtype),
        layout: OperandLayout { k, format, granularity, power_of_two },
    }
}

fn kernel_operand<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement>(
    o: &DeviceOperand<CubeBackend<R, F, I, BT>>,
) -> Operand {
    // CUDA pads the rows of tensors that Burn writes from data.
    let packed = |t: &CubeTensor<R>| match t.is_contiguous() {
        true => t.handle.clone(),
        false => into_contiguous(t.clone()).handle,
    };
    let OperandLayout { k, format, granularity, power_of_two } = o.layout;
    let (codes, inv_scale, rows) = (packed(&o.codes), packed(&o.inv_scale), o.codes.shape()[0]);
    Operand { codes, inv_scale, rows, k, format, granularity, power_of_two }
}
