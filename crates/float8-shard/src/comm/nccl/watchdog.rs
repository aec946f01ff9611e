//! Watchdog: a thread that waits for each collective in turn, so that none exceeds the time limit.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::core::Core;
use super::events::Event;
use super::library::failed;
use crate::error::ShardError;

/// Label of a collective and the event behind it.
type Watched = (String, Arc<Event>);

/// Sender to the watchdog's thread. An error of NCCL or the time limit aborts the communicator,
/// whose next call returns the error.
pub(super) struct Watchdog(Sender<Watched>);

impl Watchdog {
    /// Starts the thread. It ends once the sender is dropped and the last collective has ended.
    pub fn start(core: Arc<Core>) -> Result<Self, ShardError> {
        let (sender, receiver) = channel();
        let rank = core.rank;
        let spawned = thread::Builder::new().name("nccl-watchdog".into()).spawn(move || watch(&core, &receiver));
        spawned.map_err(|error| failed(rank, "starting the watchdog's thread", &error.to_string()))?;
        Ok(Self(sender))
    }

    pub fn add(&self, label: &str, event: Arc<Event>) {
        // The thread ends only after an error, which the next call returns.
        let _ = self.0.send((label.into(), event));
    }
}

fn watch(core: &Core, receiver: &Receiver<Watched>) {
    if let Err(error) = core.bind() {
        return core.fail(error);
    }
    while let Ok((label, event)) = receiver.recv() {
        let done = || event.is_done().map_err(|error| core.cuda(error));
        if let Err(error) = core.watch(&label, done) {
            return core.fail(error);
        }
    }
}
