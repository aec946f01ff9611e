//! One scale for the tensor, from its own amax or from one that is on the device already.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::cast::{self, Scales, TensorScale};
use super::{Copies, by_memory_order, check, words};
use crate::amax::{Maxima, find_maxima};
use crate::ptx::cvt::Isa;
use crate::view::Checked;
use crate::{Cast, Granularity, KernelError, MatrixView, Orientation, Quantized, VectorView};

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> Copies {
    let maxima = find_maxima(client, x);
    // With PTX each cube of the cast folds the maxima, which saves a launch. Elsewhere a launch folds them once: folding them in each
    // cube, by barriers and without shuffles, may take as long as the cast.
    let (maxima, amax) = if Isa::of(client).has_ptx() {
        (maxima, None)
    } else {
        let (maxima, amax) = maxima.folded(client);
        (maxima, Some(amax))
    };
    let scale = TensorScale { maxima, mode: cast.scale_mode, amax };
    cast::launch(client, x, &Scales::Tensor(scale), cast.format, orientation, None)
}

/// Casts `x [R, C]` to FP8 with one scale from an `amax` that is on the device already, f32 `[1]`, whatever that of `x`
/// is: what exceeds the format saturates. This is the cast of delayed scaling.
///
/// With `observe`, [`Quantized::amax`] is max |x| of this `x`, taken in the pass that casts it; without, it is `amax`
/// itself and nothing is computed. Codes and scale are those of [`quantize`](crate::quantize()) for an `x` of that amax; a
/// NaN gives NaN codes.
///
/// # Errors
/// [`KernelError::NotTensorwise`] for any other granularity; as [`quantize`](crate::quantize()), for `amax` too.
pub fn quantize_with_amax<R: Runtime>(
    client: &ComputeClient<R>,
    x: &MatrixView,
    amax: &Handle,
    observe: bool,
    cast: Cast,
    orientation: Orientation,
) -> Result<Quantized, KernelError> {
    if cast.granularity != Granularity::Tensor {
        return Err(KernelError::NotTensorwise { granularity: cast.granularity });
    }
    cast.check()?;
    let x = check(client, x, orientation)?;
    let dtype = f32::as_type_native_unchecked().storage_type();
    let given = Checked::vector(client, &VectorView { handle: amax.clone(), len: 1, stride: 1, dtype })?;
    let maxima = Maxima::of_amax(&given);
    let mut observed = None;
    let mut done = by_memory_order(&x, cast, orientation, |x, orientation| {
        let cubes = cast::cubes(x, orientation);
        let partials = observe.then(|| words(client, cubes));
        let scale = TensorScale { maxima, mode: cast.scale_mode, amax: Some(amax.clone()) };
        let copies = cast::launch(client, x, &Scales::Tensor(scale), cast.format, orientation, partials.as_ref());
        observed = partials.map(|partials| Maxima::partial(partials, cubes, x.source).fold(client));
        copies
    });
    if let Some(observed) = observed {
        done.amax = observed;
    }
    Ok(done)
}
