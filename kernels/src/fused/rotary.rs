//! Rotary embeddings: rotates the halves of each head, and swaps the axes of heads and positions.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Dense, FusedKernel, wide};
use crate::grid::{UNITS, elementwise_cubes};
use crate::version::Version;
use crate::{KernelError, MatrixView};

/// Rotates contiguous x `[B, T, heads, d]` by the angles of its positions into `[B, heads, T, d]`.
/// `back` computes the inverse, which is also the gradient. `x.shape` is `[B · T · heads, d]`, d
/// even; cos and sin are f32 `[T, d/2]`.
///
/// # Errors
/// As [`swiglu`](super::swiglu), and [`KernelError::ShapeMismatch`] for dimensions or tables that
/// do not fit x.
pub fn rotary<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    [cos, sin]: [&MatrixView; 2],
    [batch, len, heads]: [usize; 3],
    back: bool,
) -> Result<Handle, KernelError> {
    let [rows, dim] = x.shape;
    if rows != batch * len * heads || !dim.is_multiple_of(2) {
        return Err(KernelError::ShapeMismatch { x: x.shape, operand: [batch * len * heads, dim / 2 * 2] });
    }
    if cos.shape != [len, dim / 2] {
        return Err(KernelError::ShapeMismatch { x: x.shape, operand: cos.shape });
    }
    if cos.dtype != f32::as_type_native_unchecked().storage_type() {
        return Err(KernelError::UnsupportedDtype { dtype: cos.dtype });
    }
    let mut inputs = Dense::new(client, FusedKernel::Rotary, [x])?;
    let mut tables = Dense::new(client, FusedKernel::Rotary, [cos, sin])?;
    // At most 16 bytes of x. If the second half would start inside a vector, single elements.
    let width = if (dim / 2).is_multiple_of(inputs.width) { inputs.width.min(tables.width) } else { 1 };
    (inputs.width, tables.width) = (width, width);
    let ([x], [x_base]) = inputs.args();
    let ([cos, sin], [cos_base, sin_base]) = tables.args();
    let (y, y_arg) = inputs.output(client);
    let pairs = inputs.vectors() / 2;
    // SAFETY: the inputs are checked, and a unit stays below `pairs`: `dim / 2 / width` in a row.
    unsafe {
        rotate::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(elementwise_cubes(rows * dim) as u32),
            CubeDim::new_1d(UNITS),
            width,
            x,
            cos,
            sin,
            y_arg,
            x_base,
            cos_base,
            sin_base,
            pairs,
            (dim / 2 / width) as u32,
            // The slower and the faster axis of x; y has them swapped.
            if back { heads } else { len } as u32,
            if back { len } else { heads } as u32,
            back,
            inputs.dtype,
            Version::of(client),
        );
    }
    Ok(y)
}

/// Cubes stride through the pairs of vectors.
#[cube(launch_unchecked)]
fn rotate<O: Float, N: Size>(
    x: &Array<Vector<O, N>>,
    cos: &Array<Vector<f32, N>>,
    sin: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<O, N>>,
    x_base: u32,
    cos_base: u32,
    sin_base: u32,
    pairs: u32,
    half: u32,
    slow: u32,
    fast: u32,
    #[comptime] back: bool,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut pair = ABSOLUTE_POS as u32;
    while pair < pairs {
        // In the order of x, so that its reads are contiguous.
        let (row, within) = (pair / half, pair % half);
        let (outer, b) = (row / fast, row / fast / slow);
        let (i, j) = (outer % slow, row % fast);
        let position = if comptime!(back) { j } else { i };
        let from = x_base + row * 2 * half + within;
        let to = ((b * fast + j) * slow + i) * 2 * half + within;
        let table = position * half + within;
        let (c, s) = (cos[(cos_base + table) as usize], sin[(sin_base + table) as usize]);
        let (first, second) = (wide::<O, N>(x[from as usize]), wide::<O, N>(x[(from + half) as usize]));
        let s = if comptime!(back) { Vector::<f32, N>::new(0.0f32) - s } else { s };
        y[to as usize] = Vector::<O, N>::cast_from(first * c - second * s);
        y[(to + half) as usize] = Vector::<O, N>::cast_from(second * c + first * s);
        pair += CUBE_COUNT as u32 * UNITS;
    }
}
