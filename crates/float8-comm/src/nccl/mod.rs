//! Collectives over NCCL, on device memory and a stream that the caller owns.

mod collectives;
mod comm;
mod connect;
mod library;
mod meeting;

pub use comm::NcclComm;
pub(crate) use meeting::Meeting;
