//! SwiGLU, element by element.

use cubecl::ir::StorageType;
use cubecl::prelude::*;

use super::{
    Dense, FusedKernel, WithMaxima, largest_of, leave, maxima, maxima_arg, maxima_len, packed, unpacked, wide,
};
use crate::grid::UNITS;
use crate::ptx::cvt::Isa;
use crate::source::Source;
use crate::version::Version;
use crate::{KernelError, MatrixView};

/// `y = a σ(a) b` of contiguous `[rows, cols]`, with the maxima of its magnitudes.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ShapeMismatch`](KernelError::ShapeMismatch), [`NotContiguous`](KernelError::NotContiguous),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds), [`Misaligned`](KernelError::Misaligned),
/// [`TooLarge`](KernelError::TooLarge), [`Disabled`](KernelError::Disabled).
pub fn swiglu<R: Runtime>(
    client: &ComputeClient<R>,
    a: &MatrixView,
    b: &MatrixView,
) -> Result<WithMaxima, KernelError> {
    let inputs = Dense::new(client, FusedKernel::SwiGlu, [a, b])?;
    let cubes = maxima_len(FusedKernel::SwiGlu, a.shape);
    let maxima = maxima(client, cubes, true);
    let ([a, b], [a_base, b_base]) = inputs.args();
    let (y, y_arg) = inputs.output(client);
    let isa = Isa::of(client);
    // SAFETY: the inputs are checked, indices stay below `vectors`, and cube `i` of `cubes` writes maximum `i`.
    unsafe {
        swiglu_forward::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(cubes as u32),
            CubeDim::new_1d(UNITS),
            inputs.width,
            a,
            b,
            y_arg,
            maxima_arg(maxima.as_ref(), cubes),
            a_base,
            b_base,
            inputs.vectors(),
            isa,
            inputs.dtype,
            Version::of(client),
        );
    }
    Ok(WithMaxima { y, maxima })
}

/// The gradients of a and b, of which y has `dy`, with the maxima of their magnitudes if they are asked for.
///
/// # Errors
/// As [`swiglu`].
pub fn swiglu_backward<R: Runtime>(
    client: &ComputeClient<R>,
    a: &MatrixView,
    b: &MatrixView,
    dy: &MatrixView,
    with_maxima: bool,
) -> Result<[WithMaxima; 2], KernelError> {
    let inputs = Dense::new(client, FusedKernel::SwiGlu, [a, b, dy])?;
    let cubes = maxima_len(FusedKernel::SwiGlu, a.shape);
    let ([a, b, dy], [a_base, b_base, dy_base]) = inputs.args();
    let [(da, da_arg), (db, db_arg)] = [(); 2].map(|()| inputs.output(client));
    let [da_maxima, db_maxima] = [(); 2].map(|()| maxima(client, cubes, with_maxima));
    let isa = Isa::of(client);
    // SAFETY: as in forward.
    unsafe {
        swiglu_gradients::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(cubes as u32),
            CubeDim::new_1d(UNITS),
            inputs.width,
            a,
            b,
            dy,
            da_arg,
            db_arg,
            maxima_arg(da_maxima.as_ref(), cubes),
            maxima_arg(db_maxima.as_ref(), cubes),
            a_base,
            b_base,
            dy_base,
            inputs.vectors(),
            isa,
            inputs.dtype,
            Version::of(client),
        );
    }
    Ok([WithMaxima { y: da, maxima: da_maxima }, WithMaxima { y: db, maxima: db_maxima }])
}

/// Puts SwiGLU of the elements in `raw[first..first + words]`, words of [`load_vector`](crate::load::load_vector), and in `up` in the place of
/// the former: rounded to their dtype, the bits that [`swiglu`] writes.
#[cube]
pub(super) fn swiglu_words(
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    up: &Array<u32>,
    #[comptime] words: u32,
    #[comptime] source: Source,
    #[comptime] isa: Isa,
) {
    #[unroll]
    for w in 0..words {
        let gates = unpacked(raw, first, w, source, source, isa);
        let ups = unpacked(up, 0u32, w, source, source, isa);
        let word = if comptime!(source == Source::F32) {
            let (gate, up) = (Vector::<f32, Const<1>>::new(gates[0]), Vector::<f32, Const<1>>::new(ups[0]));
            u32::reinterpret((gate * sigmoid::<Const<1>>(gate) * up)[0])
        } else {
            packed(gates * sigmoid::<Const<2>>(gates) * ups, source)
        };
        raw[comptime!((first + w) as usize)] = word;
    }
}

/// `1 / (1 + e^-x)`
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (Vector::<f32, N>::new(0.0f32) - x).exp())
}

/// Cubes go through the vectors in step.
#[cube(launch_unchecked)]
fn swiglu_forward<O: Float, N: Size>(
    a: &Array<Vector<O, N>>,
    b: &Array<Vector<O, N>>,
    y: &mut Array<Vector<O, N>>,
    maxima: &mut ComptimeOption<Array<u32>>,
    a_base: u32,
    b_base: u32,
    vectors: u32,
    #[comptime] isa: Isa,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut largest = 0u32.runtime();
    let mut at = ABSOLUTE_POS as u32;
    while at < vectors {
        let gate = wide::<O, N>(a[(a_base + at) as usize]);
        let up = wide::<O, N>(b[(b_base + at) as usize]);
        let result = Vector::<O, N>::cast_from(gate * sigmoid::<N>(gate) * up);
        y[at as usize] = result;
        largest = largest_of::<O, N>(largest, result);
        at += CUBE_COUNT as u32 * UNITS;
    }
    leave(maxima, largest, isa);
}

/// Cubes go through the vectors in step.
#[cube(launch_unchecked)]
fn swiglu_gradients<O: Float, N: Size>(
    a: &Array<Vector<O, N>>,
    b: &Array<Vector<O, N>>,
    dy: &Array<Vector<O, N>>,
    da: &mut Array<Vector<O, N>>,
    db: &mut Array<Vector<O, N>>,
    da_maxima: &mut ComptimeOption<Array<u32>>,
    db_maxima: &mut ComptimeOption<Array<u32>>,
    a_base: u32,
    b_base: u32,
    dy_base: u32,
    vectors: u32,
    #[comptime] isa: Isa,
    #[define(O)] _dtype: StorageType,
    #[comptime] _version: Version,
) {
    let one = Vector::<f32, N>::new(1.0f32);
    let leaves = comptime!(da_maxima.is_some());
    let mut largest_da = 0u32.runtime();
    let mut largest_db = 0u32.runtime();
    let mut at = ABSOLUTE_POS as u32;
    while at < vectors {
        let gate = wide::<O, N>(a[(a_base + at) as usize]);
        let up = wide::<O, N>(b[(b_base + at) as usize]);
        let dy = wide::<O, N>(dy[(dy_base + at) as usize]);
        let s = sigmoid::<N>(gate);
        let slope = s * (gate * (one - s) + one);
        let of_gate = Vector::<O, N>::cast_from(dy * up * slope);
        let of_up = Vector::<O, N>::cast_from(dy * gate * s);
        da[at as usize] = of_gate;
        db[at as usize] = of_up;
        if comptime!(leaves) {
            largest_da = largest_of::<O, N>(largest_da, of_gate);
            largest_db = largest_of::<O, N>(largest_db, of_up);
        }
        at += CUBE_COUNT as u32 * UNITS;
    }
    leave(da_maxima, largest_da, isa);
    leave(db_maxima, largest_db, isa);
}
