//! Kernels against the reference vectors of torch (casts) and torchao (scales and codes), bit for
//! bit.

use cubecl::prelude::*;
use float8_kernels::{Orientation, quantize, quantize_with_amax};

use crate::Failure;
use crate::case::{Case, wrong};
use crate::device::{Layout, upload, upload_f32};
use crate::matrix::HostMatrix;
use crate::vectors::{CastVector, Goldens};

/// Passes every comparison with the files to `visit`, which decides what to run.
pub fn visit_goldens<R: Runtime>(client: &ComputeClient<R>, goldens: &Goldens, visit: &mut dyn FnMut(Case<'_>)) {
    for vector in goldens.vectors() {
        visit(Case::new(&vector.name, || check(client, &vector)));
    }
}

/// Tiles of MX scales are read as the GEMM reads them.
fn check<R: Runtime>(client: &ComputeClient<R>, vector: &CastVector) -> Result<f64, Failure> {
    let (cast, both) = (vector.cast, Orientation::Both);
    let (view, _) = upload(client, &vector.x, vector.shape(), Layout::RowMajor, vector.dtype);
    let done = match vector.amax {
        Some(amax) => quantize_with_amax(client, &view, &upload_f32(client, &[amax]), false, cast, both)?,
        None => quantize(client, &view, cast, both)?,
    };
    let copy = if vector.transposed { done.cols } else { done.rows };
    HostMatrix::read(client, &copy.ok_or_else(|| wrong!("no copy"))?)?.must_be(&vector.want)?;
    Ok(0.0)
}
