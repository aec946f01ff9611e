//! The last copies of activations made on this thread, so that consecutive linears on one x (q, k and v; gate and up)
//! share its cast.
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Two, so that a second input may interleave.
const LEN: usize = 2;

thread_local! {
    static RECENT: RefCell<[Option<Arc<dyn Any>>; LEN]> = const { RefCell::new([const { None }; LEN]) };
    static IS_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn push(copy: Arc<dyn Any>) {
    // What falls out is dropped after the borrow ends: dropping a tensor may run arbitrary backend code.
    let _oldest = RECENT.with_borrow_mut(|recent| {
        recent.rotate_right(1);
        recent[0].replace(copy)
    });
}

/// Notes that the last linear on this thread was one of forward.
pub(crate) fn note_forward() {
    IS_BACKWARD.set(false);
}

/// Notes that the last linear on this thread was one of backward.
pub(crate) fn note_backward() {
    IS_BACKWARD.set(true);
}

/// Forgets all if backward came last: a weight is being rebuilt, so an optimizer step is under way and no sharing can follow. In
/// forward it is a weight that the model computes.
pub(crate) fn clear() {
    if IS_BACKWARD.replace(false) {
        let _all = RECENT.try_with(|recent| std::mem::take(&mut *recent.borrow_mut()));
    }
}
