//! `code = cast_rne(clamp(f32(x) · scale, ±FMAX))` for a whole matrix, in either or both orientations, for scales of every
//! granularity.
//!
//! | granularity | reads of `x` | launches |
//! | --- | --- | --- |
//! | tensor | 2: maxima, then the cast | 2 with PTX, where each cube of the cast folds the maxima; else 3 |
//! | tensor, given amax | 1 | 1, one more to observe the amax |
//! | row, by rows | 1 | 1 |
//! | row, by columns or both | 2: maxima of all lines, then the cast | 3, or 4 for both |
//! | blocks of 128, of 32 | 1 | 1 |

mod blocks;
mod cast;
mod encode;
mod row;
mod tensor;
mod tile;

use cubecl::prelude::*;
use cubecl::server::Handle;

pub use tensor::quantize_with_amax;

use crate::view::{Checked, MAX_INDEX};
use crate::{Cast, Granularity, KernelError, MatrixView, Operand, Orientation, Quantized, row_words};

/// Casts `x [R, C]` to FP8 with scales from its own maxima, and writes the copies that `orientation` names, each scaled
/// along its own contraction.
///
/// `x` is any strided view of f32, f16 or bf16. Scales and codes equal
/// [`reference::quantize`](crate::reference::quantize) to the bit; see there and at
/// [`reference::amax_to_scale`](crate::reference::amax_to_scale) for how NaN, infinities and zeros are treated: they
/// touch the group that shares their scale. Nothing waits for the device.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ScaleModeMismatch`](KernelError::ScaleModeMismatch),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds), [`Misaligned`](KernelError::Misaligned),
/// [`TooLarge`](KernelError::TooLarge).
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    cast: Cast,
    orientation: Orientation,
) -> Result<Quantized, KernelError> {
    cast.check()?;
    let x = check(client, x, orientation)?;
    Ok(by_memory_order(&x, cast, orientation, |x, orientation| match cast.granularity {
        Granularity::Tensor => tensor::launch(client, x, cast, orientation),
        Granularity::Row => row::launch(client, x, cast, orientation),
        Granularity::Block1x32 | Granularity::Block1x128 | Granularity::Block128x128 => {
            blocks::launch(client, x, cast, orientation)
        }
    }))
}

/// One copy on the device.
struct Copy {
    codes: Handle,
    inv_scale: Handle,
    amax: Handle,
}

/// The copies that an orientation names, at least one.
struct Copies {
    rows: Option<Copy>,
    cols: Option<Copy>,
}

/// Runs `launch` on `x`, or on its transpose if that is how it lies in memory: the transpose of a column-major matrix is
/// row-major, and has the same two copies in the other order.
fn by_memory_order(
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
    launch: impl FnOnce(&Checked, Orientation) -> Copies,
) -> Quantized {
    let Copies { rows, cols } = if x.is_column_major() {
        let Copies { rows, cols } = launch(&x.clone().transpose(), orientation.transposed());
        Copies { rows: cols, cols: rows }
    } else {
        launch(x, orientation)
    };
    let amax = rows.as_ref().or(cols.as_ref()).expect("an orientation names a copy").amax.clone();
    let operand = |copy: Copy, rows, k| Operand {
        codes: copy.codes,
        inv_scale: copy.inv_scale,
        rows,
        k,
        format: cast.format,
        granularity: cast.granularity,
    };
    Quantized {
        rows: rows.map(|copy| operand(copy, x.rows, x.cols)),
        cols: cols.map(|copy| operand(copy, x.cols, x.rows)),
        amax,
    }
}

/// The view, if it and the copies are within reach of the kernels.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    orientation: Orientation,
) -> Result<Checked, KernelError> {
    let strides = x.strides;
    let x = Checked::new(client, x)?;
    for (wanted, rows, k) in [(orientation.rows(), x.rows, x.cols), (orientation.cols(), x.cols, x.rows)] {
        if wanted && rows as u64 * row_words(k) as u64 > MAX_INDEX {
            return Err(KernelError::TooLarge { rows: x.rows, cols: x.cols, strides, limit: MAX_INDEX });
        }
    }
    Ok(x)
}

/// Memory for `len` words.
fn words<R: Runtime>(client: &ComputeClient<R>, len: usize) -> Handle {
    client.empty(len * 4)
}

/// An optional kernel argument of `len` words.
fn optional<T: LaunchArg<RuntimeArg<R> = ArrayArg<R>>, R: Runtime>(
    handle: Option<&Handle>,
    len: usize,
) -> ComptimeOptionArgs<T, R> {
    // SAFETY: callers give the length that they allocated.
    handle.map(|handle| unsafe { ArrayArg::from_raw_parts(handle.clone(), len) }).into()
}
