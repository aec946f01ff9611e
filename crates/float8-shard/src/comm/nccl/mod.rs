//! Collectives over NCCL on device memory, ordered with all other work of the device.

mod bootstrap;
mod collectives;
mod comm;
mod core;
mod events;
mod in_flight;
mod library;
mod watchdog;

pub(crate) use collectives::Summed;
pub(crate) use comm::NcclComm;
pub(crate) use in_flight::InFlight;
