//! [`Reduces`]: reduce-scatters that run while backward computes other gradients.
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use parking_lot::Mutex;

use crate::collectives::PendingOnDevice;
use crate::error::ShardError;

/// Reduce-scatters of the gradients of one step.
pub(crate) struct Reduces<B: Float8Backend>(Mutex<Step<B>>);

struct Step<B: Float8Backend> {
    /// Whether the caller collects sums at the end. Without a step, backward waits for each.
    has_begun: bool,
    /// One at a time: it holds a whole gradient.
    in_flight: Option<(String, PendingOnDevice<FloatTensor<B>>)>,
    /// Sums by weight.
    sums: Vec<(String, FloatTensor<B>)>,
}

impl<B: Float8Backend> Default for Reduces<B> {
    fn default() -> Self {
        Self(Mutex::new(Step { has_begun: false, in_flight: None, sums: vec![] }))
    }
}

impl<B: Float8Backend> Reduces<B> {
    /// Begins a step. Drops unread sums.
    pub(crate) fn begin(&self) {
        *self.0.lock() = Step { has_begun: true, in_flight: None, sums: vec![] };
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().has_begun
    }

    /// Adds a reduce-scatter that was started for a weight. Waits for the previous one.
    pub(crate) fn push(&self, name: &str, started: PendingOnDevice<FloatTensor<B>>) -> Result<(), ShardError> {
        let step = &mut *self.0.lock();
        step.land()?;
        step.in_flight = Some((name.into(), started));
        Ok(())
    }

    /// Waits for the one in flight.
    pub(crate) fn finish(&self) -> Result<(), ShardError> {
        self.0.lock().land()
    }

    /// Takes the sum of a weight's gradients.
    pub(crate) fn take(&self, name: &str) -> Option<FloatTensor<B>> {
        let sums = &mut self.0.lock().sums;
        let at = sums.iter().position(|(known, _)| known == name)?;
        Some(sums.swap_remove(at).1)
    }
}

impl<B: Float8Backend> Step<B> {
    fn land(&mut self) -> Result<(), ShardError> {
        let Some((name, started)) = self.in_flight.take() else { return Ok(()) };
        let new = started()?;
        match self.sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = B::float_add(sum.clone(), new),
            None => self.sums.push((name, new)),
        }
        Ok(())
    }
}
