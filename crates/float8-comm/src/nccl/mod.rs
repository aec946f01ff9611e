//! Collectives over NCCL on device memory: on the caller's stream, or ordered with all other work
//! of the device.

mod collectives;
mod comm;
mod connect;
mod core;
mod events;
mod in_flight;
mod library;
mod meeting;
mod watchdog;

pub use comm::NcclComm;
pub use in_flight::InFlight;
pub(crate) use meeting::Meeting;
