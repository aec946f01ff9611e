//! Fused operations against their definitions in f64.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::fused::{rms_norm, rms_norm_backward, rotary, swiglu, swiglu_backward};
use float8_kernels::reference;

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::compare::Comparison;
use crate::data::{Content, F32, from_dtype};
use crate::device::{Layout, poison, read, upload};
use crate::input::Input;
use crate::oracle::Element;

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
    for dtype in all.dtypes() {
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
}

/// A result on the device, and its definition.
struct Made {
    what: &'static str,
    dtype: StorageType,
    handle: Handle,
    want: Vec<f64>,
    tolerance: f64,
}

/// Compares results with their definitions. Returns the worst error as a share of the allowed error.
fn compare<R: Runtime>(client: &ComputeClient<R>, made: Vec<Made>) -> Result<f64, Failure> {
    let mut worst = 0f64;
    for Made { what, dtype, handle, want, tolerance } in made {
        let got = from_dtype(&read(client, handle)?, dtype);
        if got.len() != want.len() {
            return Err(wrong!("{what}: {} elements, not {}", got.len(), want.len()));
        }
        // Inputs are of magnitude 1, and terms may cancel.
        let size = want.iter().fold(1.0, |max: f64, want| max.max(want.abs()));
        let mut comparison = Comparison::new(false, dtype);
        for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
            comparison.add([0, i], got, Element { want, size }, tolerance);
        }
        worst = worst.max(comparison.finish().map_err(|failure| wrong!("{what}: {failure}"))?);
    }
    Ok(worst)
}

fn check_swiglu<R: Runtime>(client: &ComputeClient<R>, input: Input) -> Result<f64, Failure> {
    let [(a, a_values), (b, b_values), (d, dy)] = [1, 2, 3].map(|seed| input.upload(client, seed));
    poison(client, &[dy.len() * input.dtype.size(); 3])?;
    let y = swiglu(client, &a, &b)?;
    let [da, db] = swiglu_backward(client, &a, &b, &d)?;
    let [want_a, want_b] = reference::fused::swiglu_backward(&a_values, &b_values, &dy);
    let made = |what, handle, want| Made { what, dtype: input.dtype, handle, want, tolerance: 1e-6 };
    let want = reference::fused::swiglu(&a_values, &b_values);
    compare(client, vec![made("y", y, want), made("da", da, want_a), made("db", db, want_b)])
}

fn check_rms_norm<R: Runtime>(client: &ComputeClient<R>, input: Input, gamma: StorageType) -> Result<f64, Failure> {
    let Input { shape: [rows, cols], dtype, .. } = input;
    let [(x, values), (d, dy)] = [1, 2].map(|seed| input.upload(client, seed));
    let (gamma, gammas) = Input { shape: [1, cols], dtype: gamma, ..input }.upload(client, 3);
    let bytes = dy.len() * dtype.size();
    poison(client, &[bytes, bytes, 512 * cols * 4, cols * 4])?;
    let y = rms_norm(client, &x, &gamma, EPSILON)?;
    let [dx, dgamma] = rms_norm_backward(client, &x, &gamma, &d, EPSILON)?;
    let epsilon = f64::from(EPSILON);
    let [want_x, want_gamma] = reference::fused::rms_norm_backward(&values, &gammas, &dy, epsilon);
    // `dgamma` sums one term for each row.
    let of_sums = 1e-6 * (rows as f64).sqrt().max(2.0);
    let want = reference::fused::rms_norm(&values, &gammas, epsilon);
    compare(
        client,
        vec![
            Made { what: "y", dtype, handle: y, want, tolerance: 1e-6 },
            Made { what: "dx", dtype, handle: dx, want: want_x, tolerance: 2e-6 },
            Made { what: "dgamma", dtype: F32, handle: dgamma, want: want_gamma, tolerance: of_sums },
        ],
    )
}

fn check_rotary<R: Runtime>(client: &ComputeClient<R>, dims: [usize; 4], dtype: StorageType) -> Result<f64, Failure> {
    let [batch, len, heads, dim] = dims;
    let input = Input { content: Content::Normal, ..Input::new([batch * len * heads, dim], dtype) };
    let (x, values) = input.upload(client, 1);
    let tables = [f32::cos, f32::sin].map(|function| {
        let table: Vec<f32> = (0..len * dim / 2).map(|i| function((i % 97) as f32 * 0.13)).collect();
        upload(client, &table, [len, dim / 2], Layout::RowMajor, F32)
    });
    let [(cos, cosines), (sin, sines)] = &tables;
    poison(client, &[values.len() * dtype.size(); 2])?;
    let mut made = vec![];
    for (what, back) in [("y", false), ("back", true)] {
        let handle = rotary(client, &x, [cos, sin], [batch, len, heads], back)?;
        let want = reference::fused::rotary(&values, [cosines, sines], dims, back);
        made.push(Made { what, dtype, handle, want, tolerance: 1e-6 });
    }
    compare(client, made)
}
