//! `code = cast_rne(clamp(f32(x) · scale, ±FMAX))` for a whole matrix, in one or both orientations,
//! for every granularity.
//!
//! | granularity | reads of `x` | launches |
//! | --- | --- | --- |
//! | tensor | 2: maxima, then the cast | 2 with PTX, where each cube of the cast folds the maxima; else 3 |
//! | tensor, given amax | 1 | 1, one more to observe the amax |
//! | row, by rows | 1 | 1 |
//! | row, by columns or both | 2: maxima of all lines, then the cast | 3, or 4 for both |
//! | blocks of 128, of 32 | 1 | 1 |

mod blocks;
mod encode;
mod lines;
mod maxima;
mod rows;
mod squares;
mod tensor;
mod tile;
mod tiles;
mod transposed;

use cubecl::prelude::*;
use cubecl::server::Handle;

use encode::Encoding;
use tensor::TensorScaleLaunch;
use tiles::TileScalesArgs;
pub use transposed::transpose;

use crate::amax::{Maxima, find_maxima};
use crate::denylist::disable;
use crate::ptx::cvt::Isa;
use crate::view::{Checked, MAX_INDEX};
use crate::words::words;
use crate::{Cast, Granularity, KernelError, MatrixView, Operand, Orientation, Quantized, VectorView, row_words};

/// Casts `x [R, C]` to FP8 with scales from its maxima. Writes the copies of `orientation`, each
/// scaled along its contraction.
///
/// `x` is any strided view of f32, f16 or bf16. Scales and codes equal
/// [`reference::quantize`](crate::reference::quantize) to the bit. The treatment of NaN, infinities
/// and zeros is described there and at
/// [`reference::amax_to_scale`](crate::reference::amax_to_scale). They only affect the group that
/// shares their scale. The host does not wait for the device.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ScaleModeMismatch`](KernelError::ScaleModeMismatch),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds),
/// [`Misaligned`](KernelError::Misaligned), [`TooLarge`](KernelError::TooLarge),
/// [`Disabled`](KernelError::Disabled).
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    cast: Cast,
    orientation: Orientation,
) -> Result<Quantized, KernelError> {
    cast.check()?;
    let x = check(client, x, orientation)?;
    Ok(by_memory_order(&x, cast, orientation, |x, orientation| {
        let encoding = Encoding::new(client, x, cast);
        match cast.granularity {
            Granularity::Tensor => tensorwise(client, x, encoding, orientation),
            Granularity::Row if orientation == Orientation::Rows => rows::launch(client, x, encoding),
            Granularity::Row => {
                let (copies, scales) = lines::scales(client, x, cast, orientation);
                tiles::launch(client, x, encoding, TileScalesArgs::Lines(scales), copies)
            }
            Granularity::Block1x128 | Granularity::Block128x128 | Granularity::Block1x32 => {
                let (copies, scales) = blocks::scales(client, x, cast, orientation);
                tiles::launch(client, x, encoding, TileScalesArgs::Blocks(scales), copies)
            }
        }
    }))
}

/// Checks a given amax, f32 `[1]`.
fn checked_amax<R: Runtime>(client: &ComputeClient<R>, amax: &Handle) -> Result<Checked, KernelError> {
    let dtype = f32::as_type_native_unchecked().storage_type();
    Checked::vector(client, &VectorView { handle: amax.clone(), len: 1, stride: 1, dtype })
}

/// Casts with one scale, from the tensor's amax.
fn tensorwise<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    encoding: Encoding,
    orientation: Orientation,
) -> Copies {
    let maxima = find_maxima(client, x);
    // With PTX each cube of the cast folds the maxima, which saves a launch. Elsewhere a launch
    // folds them once. Folding in each cube, with barriers and without shuffles, may take as long
    // as the cast.
    let (maxima, amax) = if Isa::of(client).has_ptx() {
        (maxima, None)
    } else {
        let (maxima, amax) = maxima.folded(client);
        (maxima, Some(amax))
    };
    launch_one_scale(client, x, encoding, tensor::scale(client, x, orientation, &maxima, amax.as_ref(), None))
}

/// Casts elementwise if only by rows, otherwise tile by tile.
fn launch_one_scale<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    encoding: Encoding,
    (copies, scale): (Copies, TensorScaleLaunch<R>),
) -> Copies {
    match copies.cols {
        None => rows::launch_linear(client, x, encoding, scale, copies),
        Some(_) => tiles::launch(client, x, encoding, TileScalesArgs::Tensor(scale), copies),
    }
}

/// Checks that the cast has per-tensor scaling.
fn check_tensorwise(cast: Cast) -> Result<(), KernelError> {
    match cast.granularity {
        Granularity::Tensor => cast.check(),
        granularity => {
            let reason = "scales cannot come from a given amax, which is of the whole tensor";
            Err(KernelError::UnfitGranularity { granularity, reason })
        }
    }
}

/// Casts `x [R, C]` to FP8 with one scale from a given `amax` on the device, f32 `[1]`. It need not
/// be the amax of `x`; values beyond the format saturate. This is the cast of delayed scaling.
///
/// With `observe`, [`Quantized::amax`] is max |x| of this `x`, computed in the same pass. Otherwise
/// it is `amax` and nothing is computed. Codes and scale equal [`quantize`] for an `x` with that
/// amax. A NaN gives NaN codes.
///
/// # Errors
/// [`KernelError::UnfitGranularity`] for any other granularity. Otherwise as [`quantize`], also for
/// `amax`.
pub fn quantize_with_amax<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    amax: &Handle,
    observe: bool,
    cast: Cast,
    orientation: Orientation,
) -> Result<Quantized, KernelError> {
    check_tensorwise(cast)?;
    let x = check(client, x, orientation)?;
    let maxima = Maxima::of_amax(&checked_amax(client, amax)?);
    let mut partials = None;
    let mut done = by_memory_order(&x, cast, orientation, |x, orientation| {
        let cubes =
            if orientation == Orientation::Rows { rows::linear_cubes(x) } else { tiles::cubes(x, cast.granularity) };
        let observed = observe.then(|| words(client, cubes));
        let scale = tensor::scale(client, x, orientation, &maxima, Some(amax), observed.as_ref());
        partials = observed.map(|observed| Maxima::partial(observed, cubes, x.element_type));
        launch_one_scale(client, x, Encoding::new(client, x, cast).of_given_amax(), scale)
    });
    if let Some(partials) = partials {
        done.amax = partials.fold(client);
    }
    Ok(done)
}

/// Newest instructions that casts on this device use. `None` if all are disabled and the device
/// cannot cast.
pub fn cast_instructions<R: Runtime>(client: &ComputeClient<R>) -> Option<&'static str> {
    Isa::left(client).map(|isa| match isa {
        Isa::PtxFp8 => "cvt to FP8",
        Isa::Ptx => "PTX",
        Isa::Portable => "integers",
    })
}

/// Disables the newest instructions that casts use on this device: first `cvt` to FP8, then other
/// PTX, then integer arithmetic. After that the device cannot cast.
pub fn disable_casts<R: Runtime>(client: &ComputeClient<R>) {
    if let Some(isa) = Isa::left(client) {
        disable(client, isa);
    }
}

/// One copy on the device.
struct Copy {
    codes: Handle,
    inv_scale: Handle,
    amax: Handle,
}

/// Copies of an orientation, at least one.
struct Copies {
    rows: Option<Copy>,
    cols: Option<Copy>,
}

impl Copies {
    /// Allocates the codes. `scales` returns inverse scales and amax of a copy; its argument is
    /// true for the copy by rows.
    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        x: &Checked,
        orientation: Orientation,
        scales: impl Fn(bool) -> (Handle, Handle),
    ) -> Self {
        let copy = |by_rows, rows: usize, k| {
            let (inv_scale, amax) = scales(by_rows);
            Copy { codes: words(client, rows * row_words(k)), inv_scale, amax }
        };
        Self {
            rows: orientation.rows().then(|| copy(true, x.rows, x.cols)),
            cols: orientation.cols().then(|| copy(false, x.cols, x.rows)),
        }
    }

    /// The amax that both copies share. With per-row scales, the amax of the rows if they are cast.
    fn amax(&self) -> &Handle {
        &self.rows.as_ref().or(self.cols.as_ref()).expect("an orientation names a copy").amax
    }

    /// Result as copies of `x`.
    fn finished(self, x: &Checked, cast: Cast) -> Quantized {
        let amax = self.amax().clone();
        let operand = |copy: Copy, rows, k| Operand {
            codes: copy.codes,
            inv_scale: copy.inv_scale,
            rows,
            k,
            format: cast.format,
            granularity: cast.granularity,
            power_of_two: cast.scale_mode.is_power_of_two(),
        };
        Quantized {
            rows: self.rows.map(|copy| operand(copy, x.rows, x.cols)),
            cols: self.cols.map(|copy| operand(copy, x.cols, x.rows)),
            amax,
        }
    }
}

/// Runs `launch` on `x`, or on its transpose if `x` is column-major. The transpose is then
/// row-major and has the same two copies in the other order.
fn by_memory_order(
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
    launch: impl FnOnce(&Checked, Orientation) -> Copies,
) -> Quantized {
    let copies = if x.is_column_major() {
        let Copies { rows, cols } = launch(&x.clone().transpose(), orientation.transposed());
        Copies { rows: cols, cols: rows }
    } else {
        launch(x, orientation)
    };
    copies.finished(x, cast)
}

/// Checks that the kernels can index the view and the copies.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    orientation: Orientation,
) -> Result<Checked, KernelError> {
    if Isa::left(client).is_none() {
        return Err(KernelError::Disabled);
    }
    let strides = x.strides;
    let x = Checked::new(client, x)?;
    for (wanted, rows, k) in [(orientation.rows(), x.rows, x.cols), (orientation.cols(), x.cols, x.rows)] {
        if wanted && rows as u64 * row_words(k) as u64 > MAX_INDEX {
            return Err(KernelError::TooLarge { rows: x.rows, cols: x.cols, strides, limit: MAX_INDEX });
        }
    }
    Ok(x)
}

/// Memory from [`words`] as a kernel argument.
fn array<R: Runtime>(memory: &Handle) -> ArrayArg<R> {
    // SAFETY: the memory has this many words.
    unsafe { ArrayArg::from_raw_parts(memory.clone(), memory.size_in_used() as usize / 4) }
}

/// Optional memory as a kernel argument.
fn optional<T: LaunchArg<RuntimeArg<R> = ArrayArg<R>>, R: Runtime>(
    memory: Option<&Handle>,
) -> ComptimeOptionArgs<T, R> {
    memory.map(array).into()
}
