//! One scale for the tensor, which each cube makes of its maxima.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::encode::{Encoding, lanes_scale};
use super::{Copies, array, optional, words};
use crate::Orientation;
use crate::amax::{Maxima, MaximaArray, largest_magnitude};
use crate::grid::{UNITS, cube_max};
use crate::ptx::cvt::Isa;
use crate::scale::inverse_bits;
use crate::source::Source;
use crate::view::Checked;

/// What the scale is made of: maxima, or `amax` too if that is known; then the kernel writes none. `observed` has a word per cube, for
/// the largest raw magnitude that it sees. Gives memory for the copies, and the kernel's argument.
pub(super) fn scale<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Checked,
    orientation: Orientation,
    maxima: &Maxima,
    amax: Option<&Handle>,
    observed: Option<&Handle>,
) -> (Copies, TensorScaleLaunch<R>) {
    let new_amax = amax.is_none().then(|| words(client, 1));
    let inv_scale = words(client, 1);
    let scale =
        TensorScaleLaunch::new(maxima.arg(), optional(new_amax.as_ref()), array(&inv_scale), optional(observed));
    let amax = amax.or(new_amax.as_ref()).expect("one of them");
    (Copies::new(client, x, orientation, |_| (inv_scale.clone(), amax.clone())), scale)
}

/// The scale of a tensor in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TensorScale {
    maxima: MaximaArray,
    amax: ComptimeOption<Array<u32>>,
    inv_scale: Array<u32>,
    observed: ComptimeOption<Array<u32>>,
}

#[cube]
impl TensorScale {
    /// The scale, in every unit; the first cube writes amax and inverse scale. All units of a cube must call it.
    pub(super) fn make(&mut self, #[comptime] encoding: Encoding) -> Array<f32> {
        let amax = self.maxima.amax(encoding.isa);
        let scale = lanes_scale(amax, UNITS, encoding);
        if UNIT_POS == 0 && CUBE_POS == 0 {
            #[comptime]
            if let ComptimeOption::Some(to) = &mut self.amax {
                to[0] = amax;
            }
            self.inv_scale[0] = inverse_bits(scale, encoding.isa);
        }
        let mut scales = Array::<f32>::new(1usize);
        scales[0] = f32::reinterpret(scale);
        scales
    }

    /// The largest magnitude in `raw`, of so many words, if it is to be observed.
    pub(super) fn largest(&self, raw: &Array<u32>, #[comptime] words: u32, #[comptime] source: Source) -> u32 {
        let none = 0u32.runtime();
        if comptime!(self.observed.is_some()) { largest_magnitude(none, raw, 0u32, words, source) } else { none }
    }

    /// Leaves the largest that the units of the cube have seen. All of them must call it.
    pub(super) fn observe(&mut self, largest: u32, #[comptime] isa: Isa) {
        #[comptime]
        if let ComptimeOption::Some(observed) = &mut self.observed {
            let largest = cube_max(largest, isa);
            if UNIT_POS == 0 {
                observed[CUBE_POS] = largest;
            }
        }
    }
}
