//! The last copies of activations made on this thread, so that consecutive linears on one x (q, k and v; gate and up)
//! share its cast.
use std::any::Any;
use std::cell::RefCell;

/// Two, so that a second input may interleave.
const LEN: usize = 2;

thread_local! {
    static RECENT: RefCell<[Option<Box<dyn Any>>; LEN]> = const { RefCell::new([const { None }; LEN]) };
}

/// Keeps what one cast has made.
pub(super) fn push(copies: Box<dyn Any>) {
    // What falls out is dropped after the borrow ends: dropping a tensor may run arbitrary backend code.
    let _oldest = RECENT.with_borrow_mut(|recent| {
        recent.rotate_right(1);
        recent[0].replace(copies)
    });
}

/// Forgets all: a backward pass is under way, which reads none of them.
pub(crate) fn clear() {
    let _all = RECENT.try_with(|recent| std::mem::take(&mut *recent.borrow_mut()));
}
