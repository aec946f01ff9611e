//! [`WithoutBackward`]: amaxes of linears that no backward reaches, such as frozen ones with an x
//! that needs no gradient.
//!
//! Such a forward may belong to a training step or to an evaluation. It counts as training if
//! backward reaches another linear before this one's next forward. It is dropped if backward
//! reaches this linear in the same step after all, as with recomputed activations. If a call ends a
//! step in which backward reached no linear, the last forwards before the call count.
use std::collections::HashMap;

use burn_backend::tensor::FloatTensor;

use super::peers::TrackedCast;
use crate::backend::Float8Backend;
use crate::terms::Role;

/// Amax of a cast, for its history.
#[derive(Clone)]
pub(crate) struct Observed<B: Float8Backend> {
    /// Names the layer instead of holding it, to avoid a reference cycle.
    pub(crate) cast: TrackedCast,
    pub(crate) amax: FloatTensor<B>,
}

/// Amaxes of forwards that no backward can reach.
#[derive(Default)]
pub(super) struct WithoutBackward<B: Float8Backend> {
    /// Last amax of each layer and role since backward last reached any linear.
    last: HashMap<(String, Role), Observed<B>>,
    /// Amaxes of the current step that a backward followed.
    followed: Vec<Observed<B>>,
    /// Whether backward has reached a linear in the current step.
    has_backward: bool,
}

impl<B: Float8Backend> WithoutBackward<B> {
    /// Records the amax of a forward.
    pub(super) fn note(&mut self, observed: &Observed<B>) {
        self.last.insert((observed.cast.layer.clone(), observed.cast.role), observed.clone());
    }

    /// Records that backward reached a linear.
    pub(super) fn note_backward(&mut self) {
        self.has_backward = true;
        self.follow();
    }

    /// Records that a call ended the current step.
    pub(super) fn end(&mut self) {
        if !self.has_backward {
            self.follow();
        }
    }

    fn follow(&mut self) {
        self.followed.extend(self.last.drain().map(|(_, observed)| observed));
    }

    /// Amaxes that count for the current step if backward has not reached their layers.
    pub(super) fn take(&mut self) -> Vec<Observed<B>> {
        self.has_backward = false;
        let mut followed = std::mem::take(&mut self.followed);
        // Sorted, so that new rows of the history have the same order in every run.
        followed
            .sort_by(|Observed { cast: a, .. }, Observed { cast: b, .. }| (&a.layer, a.role).cmp(&(&b.layer, b.role)));
        followed
    }
}
