//! FP8 copies of a tensor: made when a linear first needs one, shared by all clones, dropped as early as sharing allows.
//!
//! | operand | made | held |
//! | --- | --- | --- |
//! | x, by rows | fprop | weakly, plus by [`recent`]: Autodiff's saved clone of x must not keep it until backward |
//! | x, transposed | wgrad | as above |
//! | w, both orientations in one pass | fprop | by the weight, so until the optimizer replaces it |
//! | dy, both orientations in one pass | dgrad | by dy, so until its node is done |
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use burn_backend::DType;
use float8_kernels::{Cast, Orientation};

use crate::backend::{Copies, Float8Backend};
use crate::layer::{Layer, Role};
use crate::tensor::Float8Tensor;

/// Which contraction-major copy a GEMM reads of a tensor seen as `[rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Along {
    /// `[rows, cols]`: the contraction runs over the last axis.
    Rows,
    /// `[cols, rows]`: the contraction runs over all other axes.
    Cols,
}

/// One FP8 copy.
pub(crate) struct Fp8Copy<B: Float8Backend> {
    pub(crate) operand: B::Operand,
    /// The layer on whose behalf it was made.
    layer: Arc<Layer>,
}

impl<B: Float8Backend> Fp8Copy<B> {
    fn new(operand: B::Operand, layer: &Arc<Layer>) -> Arc<Self> {
        layer.count_copy(1);
        Arc::new(Self { operand, layer: layer.clone() })
    }
}

impl<B: Float8Backend> Drop for Fp8Copy<B> {
    fn drop(&mut self) {
        self.layer.count_copy(-1);
    }
}

enum Held<B: Float8Backend> {
    Strong(Arc<Fp8Copy<B>>),
    Weak(Weak<Fp8Copy<B>>),
}

/// A linear that read a tensor, for the GEMMs that come later and are not given the weight.
#[derive(Clone)]
pub(crate) struct Use {
    pub(crate) layer: Arc<Layer>,
    pub(crate) weight_dtype: DType,
    /// `[K, N]`
    pub(crate) weight_shape: [usize; 2],
    /// Whether the weight gradient of this use is still to come.
    pub(crate) pending: bool,
    /// The bias' dtype, where fprop left this record: dgrad is given no bias.
    pub(crate) bias_dtype: Option<DType>,
}

impl Use {
    /// Whether both are the same linear.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.layer, &other.layer)
            && self.weight_dtype == other.weight_dtype
            && self.weight_shape == other.weight_shape
    }
}

/// What all clones of a tensor share.
pub(crate) struct Companion<B: Float8Backend> {
    copies: Mutex<Vec<(Cast, Along, Held<B>)>>,
    uses: Mutex<Vec<Use>>,
    /// Whether a linear read this tensor as its weight.
    is_weight: AtomicBool,
}

impl<B: Float8Backend> Default for Companion<B> {
    fn default() -> Self {
        Self { copies: Mutex::default(), uses: Mutex::default(), is_weight: AtomicBool::new(false) }
    }
}

impl<B: Float8Backend> Companion<B> {
    /// Notes that a linear reads this tensor.
    pub(crate) fn add_use(&self, new: Use) {
        let mut uses = self.uses.lock().unwrap();
        match uses.iter_mut().find(|u| u.same(&new)) {
            Some(known) => *known = new,
            None => uses.push(new),
        }
    }

    /// Notes that `new` is the linear whose dgrad read this tensor last.
    pub(crate) fn set_use(&self, new: Use) {
        *self.uses.lock().unwrap() = vec![new];
    }

    pub(crate) fn is_weight(&self) -> bool {
        self.is_weight.load(Relaxed)
    }

    pub(crate) fn uses(&self) -> MutexGuard<'_, Vec<Use>> {
        self.uses.lock().unwrap()
    }
}

/// The copy of `t` that a GEMM reads, made now if no clone of `t` has one.
pub(crate) fn fp8_copy<B: Float8Backend>(
    t: &Float8Tensor<B>,
    role: Role,
    cast: Cast,
    along: Along,
    layer: &Arc<Layer>,
) -> Arc<Fp8Copy<B>> {
    // The lock is held while casting, so that threads which race for the same tensor cast it once.
    let mut copies = t.companion().copies.lock().unwrap();
    copies.retain(|(_, _, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    let find = |copies: &[(Cast, Along, Held<B>)]| {
        let (_, _, held) = copies.iter().find(|(c, a, _)| *c == cast && *a == along)?;
        match held {
            Held::Strong(copy) => Some(copy.clone()),
            Held::Weak(weak) => weak.upgrade(),
        }
    };
    if let Some(copy) = find(&copies) {
        return copy;
    }
    let orientation = match (role, along) {
        (Role::Weight, _) | (Role::GradOutput, Along::Rows) => Orientation::Both,
        (Role::Input, Along::Rows) => Orientation::Rows,
        (Role::Input | Role::GradOutput, Along::Cols) => Orientation::Cols,
    };
    layer.count_cast(role);
    t.companion().is_weight.fetch_or(role == Role::Weight, Relaxed);
    let Copies { rows, cols } = B::fp8_quantize(t.full().clone(), cast, orientation);
    let mut wanted = None;
    for (made, operand) in [(Along::Rows, rows), (Along::Cols, cols)] {
        let Some(operand) = operand else { continue };
        let copy = Fp8Copy::new(operand, layer);
        let held = if role == Role::Input {
            recent::push(copy.clone());
            Held::Weak(Arc::downgrade(&copy))
        } else {
            Held::Strong(copy.clone())
        };
        copies.push((cast, made, held));
        if made == along {
            wanted = Some(copy);
        }
    }
    wanted.expect("fp8_quantize returns every orientation that it is asked for")
}

/// The last copies of activations made on this thread, so that consecutive linears on one x (q, k and v; gate and up)
/// share its cast.
pub(crate) mod recent {
    use std::any::Any;
    use std::cell::RefCell;
    use std::sync::Arc;

    /// Two, so that a second input may interleave.
    const LEN: usize = 2;

    thread_local! {
        static RECENT: RefCell<[Option<Arc<dyn Any>>; LEN]> = const { RefCell::new([const { None }; LEN]) };
    }

    pub(crate) fn push(copy: Arc<dyn Any>) {
        // What falls out is dropped after the borrow ends: dropping a tensor may run arbitrary backend code.
        let _oldest = RECENT.with_borrow_mut(|recent| {
            recent.rotate_right(1);
            recent[0].replace(copy)
        });
    }

    /// Forgets all: no sharing can follow, since an optimizer step begins.
    pub(crate) fn clear() {
        let _all = RECENT.try_with(|recent| std::mem::take(&mut *recent.borrow_mut()));
    }
}
