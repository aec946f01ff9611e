//! Shared parts of the TMA GEMMs, for Hopper and Blackwell: plans, work items, launches and
//! pipeline stages.

pub(super) mod item;
pub(super) mod launch;
pub(crate) mod maps;
pub(super) mod plan;
pub(crate) mod ring;
pub(super) mod scales;
mod split_k;
pub(super) mod store;
