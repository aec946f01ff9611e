//! Kernels against the reference vectors of torch (casts) and torchao (scales and codes), bit for
//! bit.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, InvScale, Operand, Orientation, Scale, ScaleMode, quantize, quantize_with_amax,
    reference,
};
use test_data::Golden;

use crate::Failure;
use crate::case::{Case, wrong};
use crate::data::{BF16, F32};
use crate::device::{Layout, upload, upload_f32};
use crate::matrix::{HostMatrix, modes};
use crate::vectors::{CastVector, mx_vectors, quantize_vectors};

/// Reference files of the casts.
pub struct Goldens {
    /// cast.safetensors
    pub cast: Golden,
    /// quantize.safetensors
    pub quantize: Golden,
    /// mx.safetensors
    pub mx: Golden,
}

impl Goldens {
    /// Opens the files in [`Golden::folder`].
    pub fn open() -> Self {
        let [cast, quantize, mx] = ["cast", "quantize", "mx"].map(|name| Golden::open(&format!("{name}.safetensors")));
        Self { cast, quantize, mx }
    }
}

/// Passes every comparison with the files to `visit`, which decides what to run.
pub fn visit_goldens<R: Runtime>(client: &ComputeClient<R>, goldens: &Goldens, visit: &mut dyn FnMut(Case<'_>)) {
    for format in Format::ALL {
        for input in ["bf16", "f32", "f32_small", "edge"] {
            let name = format!("golden_cast {format} {input}");
            visit(Case::new(name, || check_cast(client, &goldens.cast, format, input)));
        }
        for &mode in modes(Granularity::Tensor) {
            let name = format!("golden_scale {format}{}", suffix(mode));
            visit(Case::new(name, || check_scales(client, &goldens.quantize, format, mode)));
        }
    }
    for vector in quantize_vectors(&goldens.quantize) {
        let name = format!("golden_codes {}", vector.name);
        visit(Case::new(name, || check_vector(client, &vector, &[Orientation::Both])));
    }
    for vector in mx_vectors(&goldens.mx) {
        let own = if vector.transposed { Orientation::Cols } else { Orientation::Rows };
        let name = format!("golden_mx {}", vector.name);
        visit(Case::new(name, || check_vector(client, &vector, &[own, Orientation::Both])));
    }
}

/// Dtype of an input, by its name in the file.
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

/// A NaN's code is 0x7f here; the files come from a CPU and keep signs.
fn canonical(code: u8, format: Format) -> u8 {
    if reference::decode(code, format).is_nan() { 0x7f } else { code }
}

/// Compares the bits of scales.
fn compare_scales(got: &[InvScale], want: &[InvScale]) -> Result<(), Failure> {
    match got.iter().zip(want).position(|(got, want)| got.get().to_bits() != want.get().to_bits()) {
        _ if got.len() != want.len() => Err(wrong!("{} scales, not {}", got.len(), want.len())),
        Some(i) => Err(wrong!("inverse scale {i} is {:e}, not {:e}", got[i].get(), want[i].get())),
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
    let codes = golden.codes(&format!("{format}_{input}_codes"));
    let codes = codes.into_iter().map(|code| canonical(code, format)).collect();
    got.must_be(&HostMatrix { codes, ..got.clone() })?;
    Ok(0.0)
}

/// Casts each amax as a row of one element, and as a matrix of one element.
fn check_scales<R: Runtime>(
    client: &ComputeClient<R>,
    golden: &Golden,
    format: Format,
    scale_mode: ScaleMode,
) -> Result<f64, Failure> {
    let amaxes = golden.floats("amax");
    let want = golden.floats(&format!("{format}_scale{}", suffix(scale_mode)));
    let want: Vec<_> = want.into_iter().map(|scale| Scale::new(scale).inverse()).collect();
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

/// Checks a copy that is cast alone or together with the other. Tiles of MX scales are read as the
/// GEMM reads them.
fn check_vector<R: Runtime>(
    client: &ComputeClient<R>,
    vector: &CastVector,
    orientations: &[Orientation],
) -> Result<f64, Failure> {
    let view = upload(client, &vector.x, vector.shape, Layout::RowMajor, dtype_of(vector.dtype));
    let Cast { format, granularity, .. } = vector.cast;
    let codes = vector.codes.iter().map(|code| canonical(*code, format)).collect();
    let want = HostMatrix { codes, inv_scales: vector.inv_scales.clone(), shape: vector.dims(), format, granularity };
    for orientation in orientations {
        let done = quantize(client, &view, vector.cast, *orientation)?;
        let got = copy(client, if vector.transposed { done.cols } else { done.rows })?;
        got.must_be(&want).map_err(|failure| wrong!("{orientation:?}: {failure}"))?;
    }
    Ok(0.0)
}
