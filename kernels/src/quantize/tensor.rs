//! Per-tensor scale, which each cube computes from the maxima.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::encode::{Encoding, lanes_scale};
use super::{Copies, array, optional, words};
use crate::Orientation;
use crate::amax::{Maxima, MaximaArray, largest_magnitude};
use crate::element_type::ElementType;
use crate::grid::{UNITS, cube_max};
use crate::ptx::cvt::Isa;
use crate::scale::inverse_bits;
use crate::view::Checked;

/// Allocates the copies. Returns them with the kernel argument.
///
/// The scale comes from `maxima`. The kernel writes an amax only if `amax` is `None`. `observed`
/// has a word per cube for the largest raw magnitude that it reads.
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

/// Per-tensor scale in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TensorScale {
    maxima: MaximaArray,
    amax: ComptimeOption<Array<u32>>,
    inv_scale: Array<u32>,
    observed: ComptimeOption<Array<u32>>,
}

#[cube]
impl TensorScale {
    /// Scale, in every unit. The first cube writes amax and inverse scale. All units of a cube must
    /// call it.
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

    /// Largest magnitude in the first `words` words of `raw`, if it is observed.
    pub(super) fn largest(
        &self,
        raw: &Array<u32>,
        #[comptime] words: u32,
        #[comptime] element_type: ElementType,
    ) -> u32 {
        let none = 0u32.runtime();
        if comptime!(self.observed.is_some()) { largest_magnitude(none, raw, 0u32, words, element_type) } else { none }
    }

    /// Stores the largest magnitude of the cube's units, if observed. All units must call it.
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
