//! torch's and torchao's results from the golden files, which are part of the program: casts, scales, codes, linears.

use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::{Float8, Float8Backend, Float8Config, Recipe, report};
use checks::{Case, Failure};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Operand, Orientation, Scale, ScaleCalculationMode, ScaleMode, quantize,
    quantize_with_amax, reference, row_words,
};
use safetensors::{Dtype, SafeTensors};

use super::linears::tolerance;
use super::relative_error;
use crate::target::Target;

const CAST: &[u8] = include_bytes!("../../../../../tests/goldens/cast.safetensors");
const QUANTIZE: &[u8] = include_bytes!("../../../../../tests/goldens/quantize.safetensors");
const LINEAR: &[u8] = include_bytes!("../../../../../tests/goldens/linear.safetensors");
const MX: &[u8] = include_bytes!("../../../../../tests/goldens/mx.safetensors");

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
const MODES: [(ScaleMode, &str); 2] = [(ScaleMode::F32, ""), (ScaleMode::PowerOfTwo, "_pow2")];
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

fn wrong(message: impl Into<String>) -> Failure {
    Failure::Wrong(message.into())
}

/// A tensor of a file: bytes, shape, dtype.
fn tensor(file: &[u8], name: &str) -> Result<(Vec<u8>, Vec<usize>, Dtype), Failure> {
    let file = SafeTensors::deserialize(file).map_err(|error| wrong(error.to_string()))?;
    let tensor = file.tensor(name).map_err(|error| wrong(format!("{name}: {error}")))?;
    Ok((tensor.data().to_vec(), tensor.shape().to_vec(), tensor.dtype()))
}

/// An f32 or bf16 tensor as f32, and its shape; a vector is a row.
fn floats(file: &[u8], name: &str) -> Result<(Vec<f32>, [usize; 2]), Failure> {
    let (bytes, shape, dtype) = tensor(file, name)?;
    let values = match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
        Dtype::BF16 => bytes.chunks_exact(2).map(|x| half::bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
        other => return Err(wrong(format!("{name} is {other:?}"))),
    };
    let len = shape.iter().product();
    Ok((values, if let [rows, cols] = shape[..] { [rows, cols] } else { [1, len] }))
}

/// Puts the floats of a file on the device in the dtype that they have there.
fn upload<R: Runtime>(client: &ComputeClient<R>, file: &[u8], name: &str) -> Result<MatrixView, Failure> {
    let (_, shape) = floats(file, name)?;
    let (bytes, _, dtype) = tensor(file, name)?;
    let dtype = if dtype == Dtype::BF16 { BF16 } else { F32 };
    Ok(MatrixView { handle: client.create_from_slice(&bytes), shape, strides: [shape[1], 1], dtype })
}

fn read<R: Runtime>(client: &ComputeClient<R>, handle: cubecl::server::Handle) -> Result<Vec<u8>, Failure> {
    let device = |error| Failure::Device(format!("{error:?}"));
    cubecl::future::block_on(client.sync()).map_err(device)?;
    Ok(client.read_one(handle).map_err(device)?.to_vec())
}

fn read_floats<R: Runtime>(client: &ComputeClient<R>, handle: cubecl::server::Handle) -> Result<Vec<f32>, Failure> {
    Ok(read(client, handle)?.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect())
}

fn read_codes<R: Runtime>(client: &ComputeClient<R>, operand: Operand) -> Result<Vec<u8>, Failure> {
    let bytes = read(client, operand.codes)?;
    Ok(bytes.chunks_exact(row_words(operand.k) * 4).flat_map(|row| row[..operand.k].to_vec()).collect())
}

/// Equal codes, or both NaN: torch's NaN may have another sign.
fn same_codes(got: &[u8], want: &[u8], format: Format) -> Result<f64, Failure> {
    let nan = |code| reference::decode(code, format).is_nan();
    let differs = |(got, want): (&u8, &u8)| got != want && !(nan(*got) && nan(*want));
    match got.iter().zip(want).position(differs) {
        _ if got.len() != want.len() => Err(wrong(format!("{} codes, not {}", got.len(), want.len()))),
        Some(i) => Err(wrong(format!("code {i} is {:#x}, not {:#x}", got[i], want[i]))),
        None => Ok(0.0),
    }
}

/// Equal bits after inverting what the file has.
fn same_scales(got: &[f32], scales: &[f32]) -> Result<(), Failure> {
    let want: Vec<f32> = scales.iter().map(|&scale| Scale::new(scale).inverse().get()).collect();
    let differs = |(got, want): (&f32, &f32)| got.to_bits() != want.to_bits();
    match got.iter().zip(&want).position(differs) {
        _ if got.len() != want.len() => Err(wrong(format!("{} scales, not {}", got.len(), want.len()))),
        Some(i) => Err(wrong(format!("inverse scale {i} is {:e}, not {:e}", got[i], want[i]))),
        None => Ok(()),
    }
}

pub fn visit<T: Target>(client: &ComputeClient<T::Runtime>, visit: &mut dyn FnMut(Case<'_>)) {
    for format in FORMATS {
        for input in ["bf16", "f32", "f32_small", "edge"] {
            visit(Case::new(format!("golden_cast {format} {input}"), || cast(client, format, input)));
        }
        for (mode, suffix) in MODES {
            visit(Case::new(format!("golden_scale {format}{suffix}"), || scales(client, format, mode, suffix)));
            for dtype in ["f32", "bf16"] {
                for granularity in [Granularity::Tensor, Granularity::Row] {
                    let name = format!("golden_codes {dtype} {format} {granularity}{suffix}");
                    let cast = Cast { format, granularity, scale_mode: mode };
                    visit(Case::new(name, || codes(client, dtype, cast, suffix)));
                }
            }
        }
    }
    for (dtype, format) in ["f32", "bf16"].into_iter().flat_map(|dtype| FORMATS.map(|format| (dtype, format))) {
        for mode in ScaleCalculationMode::ALL {
            visit(Case::new(format!("golden_mx {dtype} {format} {mode}"), || mx(client, dtype, format, mode)));
        }
    }
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::RowwiseWithGwHp] {
        for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
            if T::Backend::fp8_supports(&Default::default(), dtype) {
                let case_name = format!("golden_linear {recipe} {name}");
                visit(Case::new(case_name, || linear::<T::Backend>(recipe, name, dtype)));
            }
        }
    }
}

fn cast<R: Runtime>(client: &ComputeClient<R>, format: Format, input: &str) -> Result<f64, Failure> {
    let source = if input == "edge" { format!("{format}_edge_in") } else { format!("{input}_in") };
    let view = upload(client, CAST, &source)?;
    // The amax whose scale is 1.
    let amax = client.create_from_slice(&format.max().to_le_bytes());
    let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let rows = quantize_with_amax(client, &view, &amax, false, cast, Orientation::Rows)?.rows;
    let got = read_codes(client, rows.ok_or_else(|| wrong("no copy"))?)?;
    same_codes(&got, &tensor(CAST, &format!("{format}_{input}_codes"))?.0, format)
}

/// Each amax as a row of one element.
fn scales<R: Runtime>(
    client: &ComputeClient<R>,
    format: Format,
    scale_mode: ScaleMode,
    suffix: &str,
) -> Result<f64, Failure> {
    let mut view = upload(client, QUANTIZE, "amax")?;
    view.shape.reverse();
    view.strides = [1, 1];
    let cast = Cast { format, granularity: Granularity::Row, scale_mode };
    let rows = quantize(client, &view, cast, Orientation::Rows)?.rows.ok_or_else(|| wrong("no copy"))?;
    same_scales(&read_floats(client, rows.inv_scale)?, &floats(QUANTIZE, &format!("{format}_scale{suffix}"))?.0)?;
    Ok(0.0)
}

fn codes<R: Runtime>(client: &ComputeClient<R>, dtype: &str, cast: Cast, suffix: &str) -> Result<f64, Failure> {
    let view = upload(client, QUANTIZE, &format!("x_{dtype}"))?;
    let [rows, cols] = view.shape;
    let names = if cast.granularity == Granularity::Tensor { ["tensorwise"; 2] } else { ["rowwise", "colwise"] };
    let done = quantize(client, &view, cast, Orientation::Both)?;
    for ((operand, name), transposed) in [done.rows, done.cols].into_iter().zip(names).zip([false, true]) {
        let operand = operand.ok_or_else(|| wrong("no copy"))?;
        let name = format!("{dtype}_{}_{name}{suffix}", cast.format);
        let want = tensor(QUANTIZE, &format!("{name}_codes"))?.0;
        let want = if transposed { transpose(&want, [rows, cols]) } else { want };
        same_scales(&read_floats(client, operand.inv_scale.clone())?, &floats(QUANTIZE, &format!("{name}_scale"))?.0)?;
        same_codes(&read_codes(client, operand)?, &want, cast.format)?;
    }
    Ok(0.0)
}

/// Blocks of 32 along rows of x; the scales in tiles, as the GEMM reads them.
fn mx<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: &str,
    format: Format,
    mode: ScaleCalculationMode,
) -> Result<f64, Failure> {
    let view = upload(client, MX, &format!("x_{dtype}"))?;
    let cast = Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) };
    let operand = quantize(client, &view, cast, Orientation::Rows)?.rows.ok_or_else(|| wrong("no copy"))?;
    let name = format!("{dtype}_{format}_{mode}");
    let (scales, shape, _) = tensor(MX, &format!("{name}_scale"))?;
    let [rows, blocks] = shape[..] else { return Err(wrong(format!("{name}_scale is no matrix"))) };
    if read(client, operand.inv_scale.clone())? != float8_kernels::mx::to_blocked(&scales, rows, blocks) {
        return Err(wrong("the tiles of scales differ"));
    }
    if read_codes(client, operand)? != tensor(MX, &format!("{name}_codes"))?.0 {
        return Err(wrong("codes differ"));
    }
    Ok(0.0)
}

fn transpose<V: Copy>(x: &[V], [rows, cols]: [usize; 2]) -> Vec<V> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}

/// y, dx and dw of torchao's Float8Linear. torch keeps weights as `[out, in]`, Burn as `[in, out]`.
fn linear<B: Float8Backend>(recipe: Recipe, name: &str, dtype: DType) -> Result<f64, Failure> {
    type A<B> = Autodiff<Float8<B>>;
    let load = |values: Vec<f32>, shape: [usize; 2]| {
        Tensor::<A<B>, 2>::from_data(TensorData::new(values, shape), &Default::default()).cast(dtype)
    };
    let [x, dy] = ["x", "dy"].map(|name| floats(LINEAR, name));
    let ((x, x_shape), (dy, dy_shape), (w, [n, k])) = (x?, dy?, floats(LINEAR, "weight")?);
    let x = load(x, x_shape).detach().require_grad();
    let w = load(transpose(&w, [n, k]), [k, n]).detach().require_grad();
    let linear = Linear { weight: Param::initialized(ParamId::new(), w), bias: None };
    let failed = |error: burn_float8::Float8Error| wrong(error.to_string());
    let linear = Float8Config::new(recipe).convert(linear).map_err(|error| failed(error.into()))?.0;
    let y = linear.forward(x.clone());
    let grads = (y.clone() * load(dy, dy_shape)).sum().backward();
    let dw = linear.weight.grad(&grads).ok_or_else(|| wrong("no dw"))?.transpose();
    let dx = x.grad(&grads).ok_or_else(|| wrong("no dx"))?;
    let allowed = tolerance(&report(&linear), dtype);
    let values = |data: TensorData| data.convert::<f32>().to_vec::<f32>().map_err(|error| wrong(format!("{error:?}")));
    let mut worst = 0f64;
    for (what, data) in [("y", y.into_data()), ("dx", dx.into_data()), ("dw", dw.into_data())] {
        let error = relative_error(&values(data)?, &floats(LINEAR, &format!("{recipe}_{name}_{what}"))?.0);
        if error.is_nan() || error > allowed {
            return Err(wrong(format!("{what} is {error:.2e} from torchao's, allowed {allowed:.0e}")));
        }
        worst = worst.max(error / allowed);
    }
    Ok(worst)
}
