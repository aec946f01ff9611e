//! What an instruction does to the lanes that reached it, and the lanes of a mask.

use super::state::Wait;

/// What an instruction does to the lanes that reached it.
pub(crate) enum Flow {
    /// All go on.
    Next,
    /// Lanes of the mask stay at the instruction, to try again when what they wait for has happened.
    Stay(u32, Wait),
    /// All go on to the next instruction, but lanes of the mask wait before it.
    Then(u32, Wait),
}

pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 != 0)
}
