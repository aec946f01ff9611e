//! Fused operations against their definitions in f64.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::fused::{rms_norm, rms_norm_backward, rotary, swiglu, swiglu_backward};
use float8_kernels::{KernelError, MatrixView, reference, supports};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{Content, DTYPES, F32, from_dtype};
use crate::device::{Layout, poison, read};
use crate::input::Input;

/// One unit a row, a few units, rows that are no multiple of a vector, and rows longer than a cube
/// takes at once.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 17], [70, 96], [130, 256], [9, 2056], [2, 4101]];

/// More elements, and more rows, than all cubes take in one round.
const LARGE: [[usize; 2]; 2] = [[4096, 14_336], [70_000, 64]];

/// Batch size, positions, heads and head size.
const HEADS: [[usize; 4]; 4] = [[1, 1, 1, 2], [2, 7, 3, 10], [2, 5, 4, 64], [1, 130, 2, 8]];

const LARGE_HEADS: [[usize; 4]; 1] = [[2, 4096, 32, 128]];

const EPSILON: f32 = 1e-5;

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for dtype in DTYPES.into_iter().filter(|dtype| supports(all.client, *dtype)) {
        for shape @ [rows, cols] in all.sizes(&SHAPES, &LARGE) {
            for layout in [Layout::RowMajor, Layout::Offset] {
                let of = format!("{rows}x{cols} {dtype} {layout}");
                let input = Input { layout, content: Content::Normal, ..Input::new(shape, dtype) };
                all.add(format!("swiglu {of}"), |client| check_swiglu(client, input));
                for gamma in if dtype == F32 { vec![F32] } else { vec![F32, dtype] } {
                    all.add(format!("rms_norm {of} by {gamma}"), |client| check_rms_norm(client, input, gamma));
                }
            }
        }
        for dims @ [batch, len, heads, dim] in all.sizes(&HEADS, &LARGE_HEADS) {
            let name = format!("rotary {batch}x{len}x{heads}x{dim} {dtype}");
            all.add(name, |client| check_rotary(client, dims, dtype));
        }
    }
    all.add("fused refused", check_refused);
}

/// Compares the device's output with `want`. Returns the worst error as a share of the allowed
/// error.
fn compare<R: Runtime>(
    client: &ComputeClient<R>,
    (what, dtype): (&str, StorageType),
    got: Handle,
    want: &[f64],
    tolerance: f64,
) -> Result<f64, Failure> {
    let got = from_dtype(&read(client, got)?, dtype);
    if got.len() != want.len() {
        return Err(wrong!("{what}: {} elements, not {}", got.len(), want.len()));
    }
    // Half a step is at most 2^-11 of a value in f16, and 2^-8 in bf16.
    let rounding = if dtype == F32 { 0.0 } else { 2f64.powi(if dtype == crate::F16 { -11 } else { -8 }) };
    // Inputs are of magnitude 1, and terms may cancel.
    let largest = want.iter().fold(1.0, |max: f64, want| max.max(want.abs()));
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance * largest + rounding * want.abs();
        let error = (f64::from(*got) - want).abs() / allowed;
        if error.is_nan() || error > 1.0 {
            return Err(wrong!("{what}[{i}] is {got:e}, not {want:e}"));
        }
        worst = f64::max(worst, error);
    }
    Ok(worst)
}

fn check_swiglu<R: Runtime>(client: &ComputeClient<R>, input: Input) -> Result<f64, Failure> {
    let [(a, a_values), (b, b_values), (dy, dy_values)] = [1, 2, 3].map(|seed| input.upload(client, seed));
    let bytes = a_values.len() * input.dtype.size();
    poison(client, &[bytes, bytes])?;
    let y = swiglu(client, &a, &b)?;
    let mut worst = compare(client, ("y", input.dtype), y, &reference::fused::swiglu(&a_values, &b_values), 1e-6)?;
    let want = reference::fused::swiglu_backward(&a_values, &b_values, &dy_values);
    let gradients = swiglu_backward(client, &a, &b, &dy)?;
    for ((what, got), want) in ["da", "db"].into_iter().zip(gradients).zip(&want) {
        worst = worst.max(compare(client, (what, input.dtype), got, want, 1e-6)?);
    }
    Ok(worst)
}

fn check_rms_norm<R: Runtime>(client: &ComputeClient<R>, input: Input, gamma: StorageType) -> Result<f64, Failure> {
    let [rows, cols] = input.shape;
    let [(x, x_values), (dy, dy_values)] = [1, 2].map(|seed| input.upload(client, seed));
    let (gamma, gamma_values) = Input { shape: [1, cols], dtype: gamma, ..input }.upload(client, 3);
    let bytes = x_values.len() * input.dtype.size();
    poison(client, &[bytes, bytes, 512 * cols * 4, cols * 4])?;
    let y = rms_norm(client, &x, &gamma, EPSILON)?;
    let epsilon = f64::from(EPSILON);
    let want = reference::fused::rms_norm(&x_values, &gamma_values, epsilon);
    let mut worst = compare(client, ("y", input.dtype), y, &want, 1e-6)?;
    let want = reference::fused::rms_norm_backward(&x_values, &gamma_values, &dy_values, epsilon);
    let [dx, dgamma] = rms_norm_backward(client, &x, &gamma, &dy, EPSILON)?;
    worst = worst.max(compare(client, ("dx", input.dtype), dx, &want[0], 2e-6)?);
    // `dgamma` sums one term for each row.
    let tolerance = 1e-6 * (rows as f64).sqrt().max(2.0);
    Ok(worst.max(compare(client, ("dgamma", F32), dgamma, &want[1], tolerance)?))
}

fn check_rotary<R: Runtime>(client: &ComputeClient<R>, dims: [usize; 4], dtype: StorageType) -> Result<f64, Failure> {
    let [batch, len, heads, dim] = dims;
    let input = Input { content: Content::Normal, ..Input::new([batch * len * heads, dim], dtype) };
    let (x, x_values) = input.upload(client, 1);
    let angles: Vec<f32> = (0..len * dim / 2).map(|i| (i % 97) as f32 * 0.13).collect();
    let table = |function: fn(f32) -> f32| {
        let values: Vec<f32> = angles.iter().copied().map(function).collect();
        let handle = crate::device::upload_f32(client, &values);
        (MatrixView { handle, shape: [len, dim / 2], strides: [dim / 2, 1], dtype: F32 }, values)
    };
    let ((cos, cos_values), (sin, sin_values)) = (table(f32::cos), table(f32::sin));
    poison(client, &[x_values.len() * dtype.size()])?;
    let mut worst = 0.0;
    for back in [false, true] {
        let got = rotary(client, &x, [&cos, &sin], [batch, len, heads], back)?;
        let want = reference::fused::rotary(&x_values, [&cos_values, &sin_values], dims, back);
        worst = f64::max(worst, compare(client, (if back { "back" } else { "y" }, dtype), got, &want, 1e-6)?);
    }
    Ok(worst)
}

fn check_refused<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    let view = |shape, layout| Input { layout, content: Content::Normal, ..Input::new(shape, F32) }.upload(client, 1).0;
    let dense = view([4, 6], Layout::RowMajor);
    for layout in [Layout::ColumnMajor, Layout::Pitched, Layout::Gapped] {
        match swiglu(client, &view([4, 6], layout), &dense) {
            Err(KernelError::NotContiguous { shape: [4, 6], .. }) => {}
            other => return Err(wrong!("{layout}: {other:?}")),
        }
    }
    let (gamma, table) = (view([1, 6], Layout::RowMajor), view([2, 3], Layout::RowMajor));
    for dtype in DTYPES.into_iter().filter(|dtype| !supports(client, *dtype)) {
        let x = MatrixView { dtype, ..dense.clone() };
        let refusals = [
            swiglu(client, &x, &x).map(|_| ()),
            rms_norm(client, &x, &gamma, EPSILON).map(|_| ()),
            rotary(client, &x, [&table, &table], [1, 2, 2], false).map(|_| ()),
        ];
        if let Some(other) =
            refusals.iter().find(|refusal| !matches!(refusal, Err(KernelError::UnsupportedDtype { .. })))
        {
            return Err(wrong!("{dtype}: {other:?}"));
        }
    }
    let other = view([6, 4], Layout::RowMajor);
    let refusals = [
        swiglu(client, &dense, &other).map(|_| ()),
        rms_norm(client, &dense, &other, EPSILON).map(|_| ()),
        rotary(client, &dense, [&other, &other], [1, 2, 2], false).map(|_| ()),
        rotary(client, &dense, [&other, &other], [1, 2, 3], false).map(|_| ()),
    ];
    match refusals.iter().find(|refusal| !matches!(refusal, Err(KernelError::ShapeMismatch { .. }))) {
        None => Ok(0.0),
        Some(other) => Err(wrong!("{other:?}")),
    }
}
