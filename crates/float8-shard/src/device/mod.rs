//! Collectives on the memory of devices, by backend.
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cubecl")]
mod fusion;
#[cfg(feature = "cubecl")]
mod joined;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "cubecl")]
mod staged;

#[cfg(feature = "cubecl")]
pub use staged::stage_collectives;
