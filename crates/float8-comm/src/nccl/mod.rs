//! Collectives over NCCL, on device memory and a stream that the caller owns.

mod collectives;
mod comm;
mod connect;
mod library;

pub use comm::NcclComm;
