//! Collectives over MPI: nonblocking calls on owned buffers, waited for with a time limit.

mod collectives;
mod messages;
mod shutdown;
mod watch;
mod wire;
mod world;

use std::time::Duration;

pub(super) use collectives::Element;
pub(super) use world::Group;

use super::launch::Launch;
use crate::error::ShardError;

/// Starts MPI and compares its world with the launcher's variable. From now on a panic of a rank
/// ends the job.
pub(super) fn connect(launch: Launch, timeout: Duration) -> Result<Group, ShardError> {
    let all = Group::connect(launch, timeout)?;
    shutdown::end_on_panic(all.rank(), all.size());
    Ok(all)
}
