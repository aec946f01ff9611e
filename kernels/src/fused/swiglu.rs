//! Elementwise SwiGLU.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Dense, FusedKernel, wide};
use crate::grid::{UNITS, elementwise_cubes};
use crate::version::Version;
use crate::{KernelError, MatrixView};

/// `y = a σ(a) b` of contiguous `[rows, cols]`.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ShapeMismatch`](KernelError::ShapeMismatch),
/// [`NotContiguous`](KernelError::NotContiguous),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds),
/// [`Misaligned`](KernelError::Misaligned), [`TooLarge`](KernelError::TooLarge),
/// [`Disabled`](KernelError::Disabled).
pub fn swiglu<R: Runtime>(client: &ComputeClient<R>, a: &MatrixView, b: &MatrixView) -> Result<Handle, KernelError> {
    let inputs = Dense::new(client, FusedKernel::SwiGlu, [a, b])?;
    let ([a, b], [a_base, b_base]) = inputs.args();
    let (y, y_arg) = inputs.output(client);
    // SAFETY: the inputs are checked, and indices stay below `vectors`.
    unsafe {
        swiglu_forward::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(elementwise_cubes(inputs.elements()) as u32),
            CubeDim::new_1d(UNITS),
            inputs.width,
            a,
            b,
            y_arg,
            a_base,
            b_base,
            inputs.vectors(),
            inputs.dtype,
            Version::of(client),
        );
    }
    Ok(y)
}

/// Gradients of a and b from the gradient `dy` of y.
///
/// # Errors
/// As [`swiglu`].
pub fn swiglu_backward<R: Runtime>(
    client: &ComputeClient<R>,
    a: &MatrixView,
    b: &MatrixView,
    dy: &MatrixView,
) -> Result<[Handle; 2], KernelError> {
    let inputs = Dense::new(client, FusedKernel::SwiGlu, [a, b, dy])?;
    let ([a, b, dy], [a_base, b_base, dy_base]) = inputs.args();
    let [(da, da_arg), (db, db_arg)] = [(); 2].map(|()| inputs.output(client));
    // SAFETY: as in forward.
    unsafe {
        swiglu_gradients::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(elementwise_cubes(inputs.elements()) as u32),
            CubeDim::new_1d(UNITS),
            inputs.width,
            a,
            b,
            dy,
            da_arg,
            db_arg,
            a_base,
            b_base,
            dy_base,
            inputs.vectors(),
            inputs.dtype,
            Version::of(client),
        );
    }
    Ok([da, db])
}

/// `1 / (1 + e^-x)`
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (Vector::<f32, N>::new(0.0f32) - x).exp())
}

/// Cubes stride through the vectors.
#[cube(launch_unchecked)]
fn swiglu_forward<O: Float, N: Size>(
    a: &Array<Vector<O, N>>,
    b: &Array<Vector<O, N>>,
    y: &mut Array<Vector<O, N>>,
    a_base: u32,
    b_base: u32,
    vectors: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut at = ABSOLUTE_POS as u32;
    while at < vectors {
        let gate = wide::<O, N>(a[(a_base + at) as usize]);
        let up = wide::<O, N>(b[(b_base + at) as usize]);
        y[at as usize] = Vector::<O, N>::cast_from(gate * sigmoid::<N>(gate) * up);
        at += CUBE_COUNT as u32 * UNITS;
    }
}

/// Cubes stride through the vectors.
#[cube(launch_unchecked)]
fn swiglu_gradients<O: Float, N: Size>(
    a: &Array<Vector<O, N>>,
    b: &Array<Vector<O, N>>,
    dy: &Array<Vector<O, N>>,
    da: &mut Array<Vector<O, N>>,
    db: &mut Array<Vector<O, N>>,
    a_base: u32,
    b_base: u32,
    dy_base: u32,
    vectors: u32,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let one = Vector::<f32, N>::new(1.0f32);
    let mut at = ABSOLUTE_POS as u32;
    while at < vectors {
        let gate = wide::<O, N>(a[(a_base + at) as usize]);
        let up = wide::<O, N>(b[(b_base + at) as usize]);
        let dy = wide::<O, N>(dy[(dy_base + at) as usize]);
        let s = sigmoid::<N>(gate);
        let slope = s * (gate * (one - s) + one);
        da[at as usize] = Vector::<O, N>::cast_from(dy * up * slope);
        db[at as usize] = Vector::<O, N>::cast_from(dy * gate * s);
        at += CUBE_COUNT as u32 * UNITS;
    }
}
