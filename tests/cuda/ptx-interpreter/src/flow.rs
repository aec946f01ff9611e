//! Effect of an instruction on its lanes, and iteration over a mask.

use super::state::Wait;

/// Effect of an instruction on the lanes that reached it.
pub(crate) enum Flow {
    /// All lanes continue.
    Next,
    /// Lanes of the mask stay at the instruction and retry it after the wait.
    Stay(u32, Wait),
    /// All lanes advance, but lanes of the mask wait before the next instruction.
    Then(u32, Wait),
}

pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}
