//! Most recent casts of activations on this thread. Consecutive linears on one x (q, k and v; gate
//! and up) share its cast.
use std::any::Any;
use std::cell::RefCell;

/// Two casts, so that a second input may interleave.
const LEN: usize = 2;

thread_local! {
    static LAST: RefCell<[Option<Box<dyn Any>>; LEN]> = const { RefCell::new([const { None }; LEN]) };
}

/// Keeps the copies of one cast.
pub(super) fn push(copies: Box<dyn Any>) {
    // Dropped after the borrow ends, since dropping a tensor may run arbitrary backend code.
    let _oldest = LAST.with_borrow_mut(|last| {
        last.rotate_right(1);
        last[0].replace(copies)
    });
}

/// Drops all casts when a backward pass runs, which reads none of them.
pub(crate) fn clear() {
    let _all = LAST.try_with(|last| std::mem::take(&mut *last.borrow_mut()));
}
