//! [`GradientSlot`]: where what makes the gradient of a linear's output leaves it for the linear's node, with its maxima.
//!
//! ```text
//! linear ── y ── reshape ──► operation beside linears      forward: y brings the slot, which the node of the linear has too
//!    ▲                             │
//!    └── dy, with its maxima ──────┘                       backward: past autodiff, which would hand on the tensor alone
//! ```
//! What else reads y gives its gradient to autodiff, and the linear's node adds the two: the sum has no maxima.
use parking_lot::Mutex;

use crate::backend::{Float8Backend, FusedOutput};

/// A place for the gradient of a linear's output, with its maxima, until the linear's node takes it.
pub(crate) struct GradientSlot<B: Float8Backend>(Mutex<Option<FusedOutput<B>>>);

impl<B: Float8Backend> Default for GradientSlot<B> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<B: Float8Backend> core::fmt::Debug for GradientSlot<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("GradientSlot")
    }
}

impl<B: Float8Backend> GradientSlot<B> {
    /// Leaves a gradient in the shape of the linear's output; gives it back if another is there already.
    pub(crate) fn leave(&self, gradient: FusedOutput<B>) -> Result<(), FusedOutput<B>> {
        let mut slot = self.0.lock();
        if slot.is_some() {
            return Err(gradient);
        }
        *slot = Some(gradient);
        Ok(())
    }

    /// What was left.
    pub(crate) fn take(&self) -> Option<FusedOutput<B>> {
        self.0.lock().take()
    }
}
