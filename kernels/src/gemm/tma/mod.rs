//! What the GEMMs that TMA feeds share, those of Hopper and of Blackwell: how they cut up the work, launch, and go round their stages.

pub(super) mod item;
pub(super) mod launch;
pub(super) mod maps;
pub(super) mod plan;
pub(super) mod ring;
pub(super) mod scales;
mod split_k;
pub(super) mod store;
