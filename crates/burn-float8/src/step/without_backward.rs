//! [`WithoutBackward`]: the amaxes of linears that no backward comes to, frozen ones whose x wants no gradient.
//!
//! Of such a forward nobody can tell whether it trains or evaluates. It counts if backward comes to any linear after it and before the
//! same linear's next forward; and not for a linear to which backward comes in the step, as where activations are recomputed.
use std::collections::HashMap;

use super::delayed::Observed;
use crate::backend::Float8Backend;
use crate::terms::Role;

/// The amaxes of forwards that no backward can come to.
pub(super) struct WithoutBackward<B: Float8Backend> {
    /// By layer, the last of each since backward last came to any.
    last: HashMap<(String, Role), Observed<B>>,
    /// In the step under way, those that a backward came after.
    followed: Vec<Observed<B>>,
}

impl<B: Float8Backend> Default for WithoutBackward<B> {
    fn default() -> Self {
        Self { last: HashMap::new(), followed: vec![] }
    }
}

impl<B: Float8Backend> WithoutBackward<B> {
    /// Notes the amax of a forward.
    pub(super) fn note(&mut self, observed: &Observed<B>) {
        self.last.insert((observed.layer.clone(), observed.role), observed.clone());
    }

    /// Notes that backward has come to a linear.
    pub(super) fn note_backward(&mut self) {
        self.followed.extend(self.last.drain().map(|(_, observed)| observed));
    }

    /// What counts for the step under way, if no backward has come to its layers.
    pub(super) fn take(&mut self) -> Vec<Observed<B>> {
        let mut followed = std::mem::take(&mut self.followed);
        // As rows of the history, they are in the same order every time.
        followed.sort_by(|a, b| (&a.layer, a.role).cmp(&(&b.layer, b.role)));
        followed
    }
}
