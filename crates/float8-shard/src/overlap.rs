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

    /// Takes the sum of a weight's gradients, which may still be in flight.
    pub(crate) fn take(&self, name: &str) -> Result<Option<FloatTensor<B>>, ShardError> {
        let step = &mut *self.0.lock();
        if step.in_flight.as_ref().is_some_and(|(started, _)| started == name) {
            step.land()?;
        }
        let at = step.sums.iter().position(|(known, _)| known == name);
        Ok(at.map(|at| step.sums.swap_remove(at).1))
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

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_float8::shard_hooks::read_f32;

    use super::*;

    /// The sums of a layer are there while the last one of the layer below is in flight.
    #[test]
    fn only_the_wanted_sum_is_waited_for() {
        let (reduces, landed) = (Reduces::<Flex>::default(), Arc::new(AtomicUsize::new(0)));
        let started = |value: f32| -> PendingOnDevice<FloatTensor<Flex>> {
            let landed = landed.clone();
            Box::new(move || {
                landed.fetch_add(1, Relaxed);
                Ok(Flex::float_from_data([value].into(), &Default::default()))
            })
        };
        let take = |name| reduces.take(name).unwrap().map(read_f32::<Flex>);
        reduces.begin();
        for (name, value) in [("upper", 1.0), ("upper", 2.0), ("lower", 4.0)] {
            reduces.push(name, started(value)).unwrap();
        }
        assert_eq!((take("upper"), take("upper"), landed.load(Relaxed)), (Some(vec![3.0]), None, 2));
        assert_eq!((take("lower"), landed.load(Relaxed)), (Some(vec![4.0]), 3));
    }
}
