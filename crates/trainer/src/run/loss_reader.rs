//! [`Watch`]: reads losses and gradient norms on a separate thread, so that training does not wait.
//!
//! Steps are read in order: the thread waits for the device while the run continues. A value that
//! is not finite is noticed at most [`AHEAD`] + 1 steps later, with its own step number.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_float8::report::{Amaxes, NonFiniteOperand};

use crate::error::device_failed;
use crate::steps::Step;

/// Steps that may be queued behind the one being read.
pub(super) const AHEAD: usize = 4;

/// Values read from a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Counted from 1.
    pub(super) step: usize,
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) lr: f64,
}

impl Seen {
    pub(super) fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

/// Step, learning rate, and tensors of loss and gradient norm.
type Unread<B> = (usize, f64, [Tensor<B, 1>; 2]);

/// Steps being read.
pub(super) struct Watch<B: AutodiffBackend> {
    unread: Option<SyncSender<Unread<B::InnerBackend>>>,
    read: Receiver<Result<Seen>>,
    thread: Option<JoinHandle<()>>,
    /// Amaxes of steps whose values have not been read.
    amaxes: VecDeque<(usize, Vec<Amaxes>)>,
    last: Option<Seen>,
    /// Finite values that were not taken yet.
    seen: Vec<Seen>,
}

impl<B: AutodiffBackend> Watch<B> {
    pub(super) fn new() -> Self {
        let (unread, steps) = sync_channel::<Unread<B::InnerBackend>>(AHEAD);
        let (seen, read) = channel();
        let thread = thread::spawn(move || {
            for (step, lr, [loss, grad_norm]) in steps {
                let values = scalar(loss).and_then(|loss| Ok(Seen { step, loss, grad_norm: scalar(grad_norm)?, lr }));
                if seen.send(values).is_err() {
                    break;
                }
            }
        });
        Self { unread: Some(unread), read, thread: Some(thread), amaxes: VecDeque::new(), last: None, seen: vec![] }
    }

    /// Queues a step. Waits if [`AHEAD`] steps are already queued.
    pub(super) fn push(&mut self, step: &Step<B>) {
        self.amaxes.push_back((step.number, step.amaxes.clone()));
        let unread = self.unread.as_ref().expect("closed when dropped");
        // Fails only if the thread panicked, which `wait` reports.
        let _ = unread.send((step.number, step.lr, [step.loss.clone(), step.grad_norm.clone()]));
    }

    /// Latest step read, or the first one that is not finite. Does not wait.
    ///
    /// # Errors
    /// A device that fails.
    pub(super) fn poll(&mut self) -> Result<Option<Seen>> {
        loop {
            match self.read.try_recv() {
                Ok(seen) => {
                    let seen = self.note(seen?);
                    if !seen.is_finite() {
                        return Ok(Some(seen));
                    }
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(self.last),
            }
        }
    }

    /// Values of `step`, or of an earlier one that is not finite. Waits.
    ///
    /// # Errors
    /// A device that fails.
    pub(super) fn wait(&mut self, step: usize) -> Result<Seen> {
        loop {
            match self.last {
                Some(seen) if seen.step == step || !seen.is_finite() => return Ok(seen),
                _ => {}
            }
            let lost = |_| device_failed("reading the loss", "its thread panicked");
            let seen = self.read.recv().map_err(lost)??;
            self.note(seen);
        }
    }

    fn note(&mut self, seen: Seen) -> Seen {
        if seen.is_finite() {
            self.amaxes.retain(|(step, _)| *step > seen.step);
            self.seen.push(seen);
        }
        *self.last.insert(seen)
    }

    /// Takes the steps with finite values read since the last call, in order.
    pub(super) fn take(&mut self) -> Vec<Seen> {
        std::mem::take(&mut self.seen)
    }

    /// First non-finite operand of a step's FP8 GEMMs.
    pub(super) fn cause(&self, step: usize) -> Option<NonFiniteOperand> {
        let (_, amaxes) = self.amaxes.iter().find(|(number, _)| *number == step)?;
        amaxes.iter().find_map(Amaxes::first_non_finite)
    }
}

impl<B: AutodiffBackend> Drop for Watch<B> {
    fn drop(&mut self) {
        self.unread = None;
        if let Some(thread) = self.thread.take() {
            // The panic message was already printed.
            let _ = thread.join();
        }
    }
}

/// Reads a tensor `[1]`.
///
/// # Errors
/// A device that fails.
pub(super) fn scalar<B: Backend>(scalar: Tensor<B, 1>) -> Result<f64> {
    let data = scalar.try_into_data().map_err(|error| device_failed("reading the loss", &error))?;
    Ok(data.iter::<f64>().sum())
}
