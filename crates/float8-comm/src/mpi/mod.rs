//! Collectives over MPI: nonblocking calls on owned buffers, waited for with a time limit.

mod collectives;
mod element;
mod leave;
mod messages;
mod watch;
mod wire;
mod world;

pub(crate) use element::Element;
pub(crate) use leave::end_after_panic;
pub(crate) use world::World;
