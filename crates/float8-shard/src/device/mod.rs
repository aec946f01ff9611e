//! Collectives on the memory of CubeCL devices.
mod cube;
mod fusion;
mod joined;
#[cfg(feature = "nccl")]
mod nccl;
mod staged;

pub use staged::stage_collectives;
