//! [`Quad`]: four f32 of a unit's sums.

use cubecl::prelude::*;

pub(crate) type Quad = Vector<f32, Const<4>>;

/// `count` vectors of zeros.
#[cube]
pub(crate) fn zeros(#[comptime] count: u32) -> Array<Quad> {
    let mut zeros = Array::<Quad>::new(comptime!(count as usize));
    #[unroll]
    for i in 0..count {
        zeros[i as usize] = Quad::new(0.0f32);
    }
    zeros
}
