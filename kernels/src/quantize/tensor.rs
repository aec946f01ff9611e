//! One scale for the tensor, from its own amax or from one that is on the device already.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::cast::{self, Scales};
use super::{Copies, by_memory_order, check, words};
use crate::amax::{self, Scaling, scaling};
use crate::ptx::cvt::Isa;
use crate::scale::{inverse_bits, scale_bits};
use crate::view::{Checked, Geometry, load_scalar};
use crate::{Cast, Format, Granularity, KernelError, MatrixView, Orientation, Quantized, ScaleMode, VectorView};

pub(super) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    cast: Cast,
    orientation: Orientation,
) -> Copies {
    cast::launch(client, x, &Scales::Tensor(scaling(client, x, cast)), cast.format, orientation, None)
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
    let scaling = Scaling { amax: amax.clone(), scale: words(client, 1), inv_scale: words(client, 1) };
    // SAFETY: `given` is checked to hold one element; the kernel writes one word of each output.
    unsafe {
        scale_of_amax::launch_unchecked::<R>(
            client,
            CubeCount::new_single(),
            CubeDim::new_1d(1),
            given.array(),
            ArrayArg::from_raw_parts(scaling.scale.clone(), 1),
            ArrayArg::from_raw_parts(scaling.inv_scale.clone(), 1),
            given.geometry(),
            cast.format,
            cast.scale_mode,
            Isa::of(client),
        );
    }
    let mut observed = None;
    let mut done = by_memory_order(&x, cast, orientation, |x, orientation| {
        let cubes = cast::cubes(x, orientation);
        let partials = observe.then(|| words(client, cubes));
        let copies = cast::launch(client, x, &Scales::Tensor(scaling), cast.format, orientation, partials.as_ref());
        observed = partials.map(|partials| amax::fold_partials(client, partials, cubes, x.source));
        copies
    });
    if let Some(observed) = observed {
        done.amax = observed;
    }
    Ok(done)
}

#[cube(launch_unchecked)]
fn scale_of_amax(
    amax: &Array<u32>,
    scale: &mut Array<u32>,
    inv_scale: &mut Array<u32>,
    geometry: Geometry,
    #[comptime] format: Format,
    #[comptime] mode: ScaleMode,
    #[comptime] isa: Isa,
) {
    let bits = u32::reinterpret(load_scalar(amax, &geometry, 0u32, crate::view::Source::F32));
    let multiplier = scale_bits(bits & 0x7fff_ffffu32, format, mode, isa);
    scale[0] = multiplier;
    inv_scale[0] = inverse_bits(multiplier, isa);
}
