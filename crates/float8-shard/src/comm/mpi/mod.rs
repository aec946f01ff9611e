//! Collectives over MPI: nonblocking calls on owned buffers, waited for with a time limit.

mod collectives;
mod messages;
mod shutdown;
mod watch;
mod wire;
mod world;

pub(super) use collectives::Element;
pub(super) use world::Group;
