//! torch's casts and torchao's scales and codes from the reference vectors, bit for bit.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, InvScale, Operand, Orientation, Scale, ScaleCalculationMode, ScaleMode, quantize,
    quantize_with_amax, reference,
};
use test_data::Golden;

use crate::Failure;
use crate::case::{Case, wrong};
use crate::data::{BF16, F32, transpose};
use crate::device::{Layout, upload, upload_f32};
use crate::matrix::{HostMatrix, MX, modes};

/// The files that casts are compared with.
pub struct Goldens {
    /// cast.safetensors
    pub cast: Golden,
    /// quantize.safetensors
    pub quantize: Golden,
    /// mx.safetensors
    pub mx: Golden,
}

impl Goldens {
    /// The files of [`Golden::folder`].
    pub fn open() -> Self {
        let [cast, quantize, mx] = ["cast", "quantize", "mx"].map(|name| Golden::open(&format!("{name}.safetensors")));
        Self { cast, quantize, mx }
    }
}

/// Hands every comparison with the files to `visit`, which runs those that it wants to.
pub fn visit_goldens<R: Runtime>(client: &ComputeClient<R>, goldens: &Goldens, visit: &mut dyn FnMut(Case<'_>)) {
    for format in Format::ALL {
        for input in ["bf16", "f32", "f32_small", "edge"] {
            let name = format!("golden_cast {format} {input}");
            visit(Case::new(name, || check_cast(client, &goldens.cast, format, input)));
        }
        for &mode in modes(Granularity::Tensor) {
            let name = format!("golden_scale {format}{}", suffix(mode));
            visit(Case::new(name, || check_scales(client, &goldens.quantize, format, mode)));
            for (dtype, granularity) in
                dtypes().flat_map(|dtype| [Granularity::Tensor, Granularity::Row].map(|g| (dtype, g)))
            {
                let cast = Cast { format, granularity, scale_mode: mode };
                let name = format!("golden_codes {dtype} {format} {granularity}{}", suffix(mode));
                visit(Case::new(name, || check_codes(client, &goldens.quantize, dtype, cast)));
            }
        }
        for (dtype, mode) in dtypes().flat_map(|dtype| ScaleCalculationMode::ALL.map(|mode| (dtype, mode))) {
            let name = format!("golden_mx {dtype} {format} {mode}");
            visit(Case::new(name, || check_mx(client, &goldens.mx, dtype, format, mode)));
        }
    }
}

fn dtypes() -> impl Iterator<Item = &'static str> {
    ["f32", "bf16"].into_iter()
}

/// What the file's names begin with is the dtype of their values.
fn dtype_of(name: &str) -> StorageType {
    if name == "bf16" { BF16 } else { F32 }
}

const fn suffix(mode: ScaleMode) -> &'static str {
    match mode {
        ScaleMode::PowerOfTwo => "_pow2",
        _ => "",
    }
}

fn copy<R: Runtime>(client: &ComputeClient<R>, operand: Option<Operand>) -> Result<HostMatrix, Failure> {
    HostMatrix::read(client, &operand.ok_or_else(|| wrong!("no copy"))?)
}

/// Equal codes. A NaN's code is 0x7f; the file's, made on a CPU, keep signs.
fn compare_codes(got: &[u8], want: &[u8], format: Format) -> Result<(), Failure> {
    let canonical = |code: u8| if reference::decode(code, format).is_nan() { 0x7f } else { code };
    match got.iter().zip(want).position(|(got, want)| *got != canonical(*want)) {
        _ if got.len() != want.len() => Err(wrong!("{} codes, not {}", got.len(), want.len())),
        Some(i) => Err(wrong!("code {i} is {:#x}, not {:#x}", got[i], want[i])),
        None => Ok(()),
    }
}

/// Equal bits after inverting what the file has.
fn compare_scales(got: &[InvScale], scales: &[f32]) -> Result<(), Failure> {
    let want: Vec<_> = scales.iter().map(|&scale| Scale::new(scale).inverse().get()).collect();
    match got.iter().zip(&want).position(|(got, want)| got.get().to_bits() != want.to_bits()) {
        _ if got.len() != want.len() => Err(wrong!("{} scales, not {}", got.len(), want.len())),
        Some(i) => Err(wrong!("inverse scale {i} is {:e}, not {:e}", got[i].get(), want[i])),
        None => Ok(()),
    }
}

fn check_cast<R: Runtime>(
    client: &ComputeClient<R>,
    golden: &Golden,
    format: Format,
    input: &str,
) -> Result<f64, Failure> {
    let source = if input == "edge" { format!("{format}_edge_in") } else { format!("{input}_in") };
    let x = golden.floats(&source);
    let view = upload(client, &x, [1, x.len()], Layout::RowMajor, dtype_of(input));
    // The amax whose scale is 1.
    let amax = upload_f32(client, &[format.max()]);
    let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let got = copy(client, quantize_with_amax(client, &view, &amax, false, cast, Orientation::Rows)?.rows)?;
    compare_codes(&got.codes, &golden.codes(&format!("{format}_{input}_codes")), format)?;
    Ok(0.0)
}

/// Each amax as a row of one element, and each as a matrix of one.
fn check_scales<R: Runtime>(
    client: &ComputeClient<R>,
    golden: &Golden,
    format: Format,
    scale_mode: ScaleMode,
) -> Result<f64, Failure> {
    let amaxes = golden.floats("amax");
    let want = golden.floats(&format!("{format}_scale{}", suffix(scale_mode)));
    let cast = Cast { format, granularity: Granularity::Row, scale_mode };
    let view = upload(client, &amaxes, [amaxes.len(), 1], Layout::RowMajor, F32);
    let rows = copy(client, quantize(client, &view, cast, Orientation::Rows)?.rows)?;
    compare_scales(&rows.inv_scales, &want)?;
    let cast = Cast { granularity: Granularity::Tensor, ..cast };
    for (amax, want) in amaxes.iter().zip(&want) {
        let view = upload(client, &[*amax], [1, 1], Layout::RowMajor, F32);
        let one = copy(client, quantize(client, &view, cast, Orientation::Rows)?.rows)?;
        compare_scales(&one.inv_scales, &[*want]).map_err(|failure| wrong!("amax {amax:e}: {failure}"))?;
    }
    Ok(0.0)
}

/// The copy by rows against torchao's `rowwise`, the copy by columns against its `colwise`, whose scales are those of the
/// contraction over rows.
fn check_codes<R: Runtime>(
    client: &ComputeClient<R>,
    golden: &Golden,
    dtype: &str,
    cast: Cast,
) -> Result<f64, Failure> {
    let name = format!("x_{dtype}");
    let shape = golden.matrix(&name);
    let view = upload(client, &golden.floats(&name), shape, Layout::RowMajor, dtype_of(dtype));
    let names = if cast.granularity == Granularity::Tensor { ["tensorwise"; 2] } else { ["rowwise", "colwise"] };
    let done = quantize(client, &view, cast, Orientation::Both)?;
    for ((operand, name), transposed) in [done.rows, done.cols].into_iter().zip(names).zip([false, true]) {
        let got = copy(client, operand)?;
        let name = format!("{dtype}_{}_{name}{}", cast.format, suffix(cast.scale_mode));
        let want = golden.codes(&format!("{name}_codes"));
        let want = if transposed { transpose(&want, shape) } else { want };
        compare_scales(&got.inv_scales, &golden.floats(&format!("{name}_scale")))?;
        compare_codes(&got.codes, &want, cast.format)?;
    }
    Ok(0.0)
}

/// By rows as the file has it, and by columns of the transpose, each alone and beside the other. Tiles of scales are read as the
/// GEMM reads them.
fn check_mx<R: Runtime>(
    client: &ComputeClient<R>,
    golden: &Golden,
    dtype: &str,
    format: Format,
    mode: ScaleCalculationMode,
) -> Result<f64, Failure> {
    let name = format!("x_{dtype}");
    let (x, shape @ [rows, k]) = (golden.floats(&name), golden.matrix(&name));
    let flipped = transpose(&x, shape);
    let cast = Cast { format, granularity: MX, scale_mode: ScaleMode::E8m0(mode) };
    let name = format!("{dtype}_{format}_{mode}");
    let (scales, codes) = (golden.codes(&format!("{name}_scale")), golden.codes(&format!("{name}_codes")));
    for orientation in [Orientation::Rows, Orientation::Cols, Orientation::Both] {
        for transposed in [false, true] {
            if !(if transposed { orientation.cols() } else { orientation.rows() }) {
                continue;
            }
            let (x, shape) = if transposed { (&flipped, [k, rows]) } else { (&x, shape) };
            let done =
                quantize(client, &upload(client, x, shape, Layout::RowMajor, dtype_of(dtype)), cast, orientation)?;
            let got = copy(client, if transposed { done.cols } else { done.rows })?;
            let what = format!("{orientation:?}, transposed: {transposed}");
            if got.inv_scales.iter().map(|scale| scale.to_e8m0()).ne(scales.iter().map(|&byte| Some(byte))) {
                return Err(wrong!("{what}: scales differ"));
            }
            compare_codes(&got.codes, &codes, format).map_err(|failure| wrong!("{what}: {failure}"))?;
        }
    }
    Ok(0.0)
}
