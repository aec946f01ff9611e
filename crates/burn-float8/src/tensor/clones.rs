//! Numbers for the clones of a tensor. They tell a linear whether Autodiff has saved its x, and wgrad and dgrad which graph their x or
//! w comes from.
//!
//! Autodiff clones the arguments that it saves, x before w, and calls the operation right afterwards: a linear finds these clones
//! as the last ones that its thread has made. When a backward pass begins, Autodiff keeps the first clone of x that its graph has
//! saved, by whatever operation, which wgrad is given (or clones of it), and drops the graph's others; so with w and dgrad.
//!
//! Clones of other graphs are dropped too, when any thread's backward has ended and nothing refers to them any more. A backward
//! pass is known by what its thread does just before and after it drops its own: it clones the root, and makes a tensor of ones
//! ([`note_ones`]).
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

/// The number of a clone among those of its tensor, and of the clone that it was made from; the original is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CloneId {
    own: u32,
    parent: u32,
}

/// What the clones of a tensor share.
#[derive(Debug, Default)]
pub(super) struct Clones {
    newest: AtomicU32,
    /// Clones that linears have found saved, of their x or weight: most tensors have none.
    saved: OnceLock<SavedClones>,
}

type SavedClones = Arc<Mutex<Vec<Saved>>>;

/// A clone that Autodiff has saved and that lives, or that a backward pass dropped when it began.
#[derive(Debug)]
struct Saved {
    clone: SavedClone,
    is_alive: bool,
}

impl Clones {
    /// The clone of `id`.
    fn next(&self, id: CloneId) -> CloneId {
        let new = CloneId { own: self.newest.fetch_add(1, Relaxed).wrapping_add(1), parent: id.own };
        let [last, _] = LAST.get();
        LAST.set([(self.address(), new), last]);
        let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().clear());
        new
    }

    fn address(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// Whether a saved clone lives, if it is known.
    fn is_alive(&self, clone: SavedClone) -> Option<bool> {
        let saved = self.saved.get()?.lock();
        saved.iter().find(|saved| saved.clone == clone).map(|saved| saved.is_alive)
    }

    /// Notes that a clone is gone.
    fn forget(&self, id: CloneId) {
        let Some(saved) = self.saved.get() else { return };
        let was_alive = saved.lock().extract_if(.., |saved| saved.clone == id.own && saved.is_alive).next().is_some();
        if was_alive {
            let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().push((saved.clone(), id.own)));
        }
    }
}

/// Called where a tensor of ones is made, as the first gradient of a backward pass is: the saved clones that this thread has
/// dropped since its last clone were dropped by that pass.
pub(crate) fn note_ones() {
    for (saved, clone) in DROPPED.take() {
        saved.lock().push(Saved { clone, is_alive: false });
    }
}

type LastClone = (usize, CloneId);
thread_local! {
    /// The last clones of this thread, by the address of what their tensor's clones share, and those before.
    static LAST: Cell<[LastClone; 2]> = const { Cell::new([(0, CloneId { own: 0, parent: 0 }); 2]) };
    /// Saved clones that this thread has dropped since it made a clone.
    static DROPPED: RefCell<Vec<(SavedClones, SavedClone)>> = const { RefCell::new(vec![]) };
}

/// A clone that Autodiff has saved.
pub(crate) type SavedClone = u32;

/// One clone of a tensor, `S` being what all of them share.
pub(super) struct Handle<S: AsRef<Clones>> {
    id: CloneId,
    shared: Arc<S>,
}

impl<S: AsRef<Clones> + Default> Default for Handle<S> {
    fn default() -> Self {
        Self { id: CloneId::default(), shared: Arc::default() }
    }
}

impl<S: AsRef<Clones>> Clone for Handle<S> {
    fn clone(&self) -> Self {
        Self { id: self.shared.as_ref().as_ref().next(self.id), shared: self.shared.clone() }
    }
}

impl<S: AsRef<Clones>> Drop for Handle<S> {
    fn drop(&mut self) {
        self.clones().forget(self.id);
    }
}

impl<S: AsRef<Clones>> Handle<S> {
    pub(super) fn shared(&self) -> &Arc<S> {
        &self.shared
    }

    fn clones(&self) -> &Clones {
        self.shared.as_ref().as_ref()
    }

    /// Whether this was made from `argument`.
    fn is_of(&self, (address, id): LastClone) -> bool {
        address == self.clones().address() && id.parent == self.id.own
    }

    /// The clones that Autodiff has saved of x and w just before it called the operation with them as arguments.
    pub(super) fn saved_of<T: AsRef<Clones>>(x: &Self, w: &Handle<T>) -> [Option<SavedClone>; 2] {
        let [last, before] = LAST.get();
        let of_w = w.is_of(last).then_some(last.1.own);
        let candidate = if of_w.is_some() { before } else { last };
        let of_x = x.is_of(candidate).then_some(candidate.1.own);
        if let Some(own) = of_x {
            x.add_saved(own);
        }
        [of_x, of_w]
    }

    /// From now on it is known what becomes of this clone.
    pub(super) fn add_saved(&self, clone: SavedClone) {
        self.clones().saved.get_or_init(Arc::default).lock().push(Saved { clone, is_alive: true });
    }

    /// Whether a clone that was [added](Self::add_saved) still lives.
    pub(super) fn is_alive(&self, saved: SavedClone) -> bool {
        self.clones().is_alive(saved) == Some(true)
    }

    /// Whether a backward pass dropped this clone when it began, since its graph had saved another one before.
    pub(super) fn is_walked(&self, saved: SavedClone) -> bool {
        self.clones().is_alive(saved) == Some(false)
    }

    /// Forgets a clone that a backward pass has come to.
    pub(super) fn remove_saved(&self, clone: SavedClone) {
        if let Some(saved) = self.clones().saved.get() {
            saved.lock().retain(|saved| saved.clone != clone);
        }
    }

    /// Whether this is that clone or was made from it.
    pub(super) fn is_clone_of(&self, saved: SavedClone) -> bool {
        saved == self.id.own || saved == self.id.parent
    }
}
