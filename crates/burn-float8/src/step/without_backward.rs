//! [`WithoutBackward`]: the amaxes of linears that no backward comes to, frozen ones whose x wants no gradient.
//!
//! Such a forward may belong to a training step or to an evaluation. It is taken for one of training if backward comes to some other linear
//! before this one's next forward. It is dropped if backward comes to this linear in the same step after all, as where activations
//! are recomputed. Where backward comes to no linear in a step that a call ends, the last forwards before that call count.
use std::collections::HashMap;

use burn_backend::tensor::FloatTensor;

use super::peers::TrackedCast;
use crate::backend::Float8Backend;
use crate::terms::Role;

/// The amax that a cast has seen, for its history.
#[derive(Clone)]
pub(crate) struct Observed<B: Float8Backend> {
    /// With the layer by its name: a history outlives no model, and a layer no cycle.
    pub(crate) cast: TrackedCast,
    pub(crate) amax: FloatTensor<B>,
}

/// The amaxes of forwards that no backward can come to.
pub(super) struct WithoutBackward<B: Float8Backend> {
    /// By layer, the last of each since backward last came to any.
    last: HashMap<(String, Role), Observed<B>>,
    /// In the step under way, those that a backward came after.
    followed: Vec<Observed<B>>,
    /// Whether backward has come to a linear in the step under way.
    has_backward: bool,
}

impl<B: Float8Backend> Default for WithoutBackward<B> {
    fn default() -> Self {
        Self { last: HashMap::new(), followed: vec![], has_backward: false }
    }
}

impl<B: Float8Backend> WithoutBackward<B> {
    /// Notes the amax of a forward.
    pub(super) fn note(&mut self, observed: &Observed<B>) {
        self.last.insert((observed.cast.layer.clone(), observed.cast.role), observed.clone());
    }

    /// Notes that backward has come to a linear.
    pub(super) fn note_backward(&mut self) {
        self.has_backward = true;
        self.follow();
    }

    /// Notes that the step under way has ended, by a call.
    pub(super) fn end(&mut self) {
        if !self.has_backward {
            self.follow();
        }
    }

    fn follow(&mut self) {
        self.followed.extend(self.last.drain().map(|(_, observed)| observed));
    }

    /// What counts for the step under way, if no backward has come to its layers.
    pub(super) fn take(&mut self) -> Vec<Observed<B>> {
        self.has_backward = false;
        let mut followed = std::mem::take(&mut self.followed);
        // New rows of the history are in the same order in every run.
        followed
            .sort_by(|Observed { cast: a, .. }, Observed { cast: b, .. }| (&a.layer, a.role).cmp(&(&b.layer, b.role)));
        followed
    }
}
