//! FP8 copies of a tensor: made when a linear first needs one, shared by all clones, dropped as early as sharing allows.
//!
//! | operand | made | held |
//! | --- | --- | --- |
//! | x, by rows | fprop | weakly, plus by [`recent`]: Autodiff's saved clone of x must not keep it until backward |
//! | x, transposed | wgrad | as above; in the forward of [`linear`](crate::linear()), by its saved state |
//! | w, both orientations in one pass if they are cast alike | fprop | by the weight, so until the optimizer replaces it; with `force_recompute_fp8_weight_in_bwd` each when it is needed, by nobody |
//! | dy, both orientations in one pass if they are cast alike | dgrad | by dy, so until its node is done |
//!
//! All copies of one cast of a tensor have one scale: what the first of them finds out is kept, also for a tensor of the same
//! elements with zeros between ([`Companion::inherit`]). A tensor that gradient checkpointing computes again is another
//! one.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use float8_kernels::{Cast, Granularity, Orientation};

use crate::backend::{Copies, Float8Backend, ScaleFrom};
use crate::config::{DelayedScaling, Float8LinearConfig, ScalingType};
use crate::group::DeviceState;
use crate::health;
use crate::layer::{Along, Layer, Role};
use crate::tensor::Float8Tensor;

/// One FP8 copy.
pub(crate) struct Fp8Copy<B: Float8Backend> {
    pub(crate) operand: B::Operand,
    /// The layer on whose behalf it was made.
    layer: Arc<Layer>,
    bytes: i64,
}

impl<B: Float8Backend> Fp8Copy<B> {
    fn new(operand: B::Operand, layer: &Arc<Layer>) -> Arc<Self> {
        let bytes = B::fp8_extent(&operand).bytes as i64;
        layer.count_copy(1, bytes);
        Arc::new(Self { operand, layer: layer.clone(), bytes })
    }
}

impl<B: Float8Backend> Drop for Fp8Copy<B> {
    fn drop(&mut self) {
        self.layer.count_copy(-1, self.bytes);
    }
}

impl<B: Float8Backend> core::fmt::Debug for Fp8Copy<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.operand.fmt(f)
    }
}

enum Held<B: Float8Backend> {
    Strong(Arc<Fp8Copy<B>>),
    Weak(Weak<Fp8Copy<B>>),
}

/// What tells two casts of one tensor apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CastKey {
    cast: Cast,
    /// Scaled by a history, of this kind: the codes then differ from those that the tensor's own amax would give.
    delayed: Option<DelayedScaling>,
}

/// The amaxes of a cast of a tensor: all copies of one cast have the same scale.
pub(crate) struct Amaxes<B: Float8Backend> {
    /// What the scale is made of: `[1]`, or an array whose maximum that is.
    pub(crate) scaling: FloatTensor<B>,
    /// The tensor's own, where it was looked at.
    pub(crate) observed: Option<FloatTensor<B>>,
}

/// What the first cast of a tensor leaves to the others.
#[derive(Clone)]
struct Known<B: Float8Backend> {
    amaxes: Arc<Amaxes<B>>,
    /// That of the layer that cast the tensor first: sharers use it too.
    history: Option<Arc<Observation<B>>>,
}

/// The amax of a tensor for the history of delayed scaling that its cast belongs to.
pub(crate) struct Observation<B: Float8Backend> {
    state: Arc<DeviceState<B>>,
    /// The layer by its name: a history outlives no model, and a layer no cycle.
    layer: String,
    role: Role,
    delayed: DelayedScaling,
    /// An amax whose scale is 1.
    initial: f32,
    amax: FloatTensor<B>,
    is_told: AtomicBool,
}

/// Tells a history what backward has confirmed: evaluations run fprop too, and leave no trace.
pub(crate) trait Tell: Send + Sync {
    /// Adds the amax to the step, once.
    fn tell(&self);
}

impl<B: Float8Backend> Tell for Observation<B> {
    fn tell(&self) {
        if !self.is_told.swap(true, Relaxed) {
            let Self { state, layer, role, delayed, initial, amax, .. } = self;
            state.lock().histories.observe(layer, *role, *delayed, amax.clone(), *initial);
        }
    }
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
    casts: Mutex<Casts<B>>,
    uses: Mutex<Vec<Use>>,
    /// Whether a linear read this tensor as its weight.
    is_weight: AtomicBool,
    /// How many of its elements are those of another tensor, where others are zeros.
    elements: OnceLock<u64>,
}

struct Casts<B: Float8Backend> {
    copies: Vec<(CastKey, Along, Held<B>)>,
    known: Vec<(CastKey, Known<B>)>,
}

impl<B: Float8Backend> Default for Companion<B> {
    fn default() -> Self {
        Self {
            casts: Mutex::new(Casts { copies: vec![], known: vec![] }),
            uses: Mutex::default(),
            is_weight: AtomicBool::new(false),
            elements: OnceLock::new(),
        }
    }
}

impl<B: Float8Backend> Companion<B> {
    /// Takes over what is known of casts of `other` with one scale, whose `elements` this tensor has, and zeros beside them, which
    /// no share counts.
    pub(crate) fn inherit(&self, other: &Self, elements: u64) {
        self.elements.get_or_init(|| elements);
        let others = other.casts.lock().unwrap();
        let one_scale = others.known.iter().filter(|(key, _)| key.cast.granularity == Granularity::Tensor);
        let known = one_scale.map(|(key, known)| (*key, known.clone())).collect();
        drop(others);
        self.casts.lock().unwrap().known = known;
    }

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

    /// Notes that a linear reads this tensor as its weight.
    pub(crate) fn mark_weight(&self) {
        self.is_weight.store(true, Relaxed);
    }

    pub(crate) fn is_weight(&self) -> bool {
        self.is_weight.load(Relaxed)
    }

    pub(crate) fn uses(&self) -> MutexGuard<'_, Vec<Use>> {
        self.uses.lock().unwrap()
    }
}

/// Which cast of a tensor, and for whom.
#[derive(Clone, Copy)]
pub(crate) struct CastOf<'a> {
    pub(crate) role: Role,
    pub(crate) along: Along,
    pub(crate) layer: &'a Arc<Layer>,
    pub(crate) config: &'a Float8LinearConfig,
}

/// What is cast in place of a tensor: its elements as another matrix, computed when it is needed.
pub(crate) type View<'a, B> = Option<&'a dyn Fn() -> FloatTensor<B>>;

/// The copy of `t` that a GEMM reads, made now if no clone of `t` has one. What is learnt of `t` in forward counts once
/// backward follows.
pub(crate) fn fp8_copy<B: Float8Backend>(t: &Float8Tensor<B>, of: CastOf<'_>, in_forward: bool) -> Arc<Fp8Copy<B>> {
    fp8_copy_of(t, None, of, in_forward)
}

/// [`fp8_copy`] of a view of `t`, in this orientation alone: no other view of `t` may be cast with the same key.
pub(crate) fn fp8_copy_of<B: Float8Backend>(
    t: &Float8Tensor<B>,
    view: View<'_, B>,
    of: CastOf<'_>,
    in_forward: bool,
) -> Arc<Fp8Copy<B>> {
    let CastOf { role, along, layer, .. } = of;
    let key = of.key();
    // The lock is held while casting, so that threads which race for the same tensor cast it once.
    let mut casts = t.companion().casts.lock().unwrap();
    casts.copies.retain(|(_, _, held)| !matches!(held, Held::Weak(weak) if weak.strong_count() == 0));
    let copy = match casts.find(key, along) {
        Some(copy) => copy,
        None => casts.make(t, view, of),
    };
    let (_, known) = casts.known.iter().find(|(k, _)| *k == key).expect("a copy leaves its amaxes");
    let Known { amaxes, history } = known.clone();
    drop(casts);
    layer.health.set_last(role, along, key.cast, amaxes);
    if let Some(history) = history {
        match in_forward {
            true => layer.tell_in_backward(role, history),
            false => history.tell(),
        }
    }
    let full = || view.map_or_else(|| t.full().clone(), |view| view());
    let elements = t.companion().elements.get().copied().unwrap_or_else(|| t.full().shape().num_elements() as u64);
    health::sample::<B>(full, elements, &B::float_device(t.full()), of, &copy.operand, in_forward);
    copy
}

impl CastOf<'_> {
    fn key(self) -> CastKey {
        let Self { role, along, config, .. } = self;
        let cast = config.casts().of(role, along);
        let delayed = (cast.scaling_type == ScalingType::Delayed).then(|| config.delayed_scaling());
        CastKey { cast: config.kernel_cast(role, along), delayed }
    }

    /// Which copies one pass makes: both where the other GEMM will read the same cast.
    fn orientation(self) -> Orientation {
        let Self { role, along, config, .. } = self;
        let other = Self { along: along.other(), ..self };
        let shared = !config.casts().of(role, other.along).is_disabled() && self.key() == other.key();
        let both = match role {
            Role::Input => false,
            Role::Weight => shared && !config.force_recompute_fp8_weight_in_bwd(),
            // wgrad comes after dgrad.
            Role::GradOutput => shared && along == Along::Rows,
        };
        if both { Orientation::Both } else { along.orientation() }
    }
}

impl<B: Float8Backend> Casts<B> {
    fn find(&self, key: CastKey, along: Along) -> Option<Arc<Fp8Copy<B>>> {
        let (_, _, held) = self.copies.iter().find(|(k, a, _)| *k == key && *a == along)?;
        match held {
            Held::Strong(copy) => Some(copy.clone()),
            Held::Weak(weak) => weak.upgrade(),
        }
    }

    /// Casts `t`, keeps the copies as the module says, and returns the one along the axis that is asked for.
    fn make(&mut self, t: &Float8Tensor<B>, view: View<'_, B>, of: CastOf<'_>) -> Arc<Fp8Copy<B>> {
        let CastOf { role, along, layer, config } = of;
        layer.count_cast(role);
        let Copies { rows, cols, .. } = self.quantize(t, view, of);
        let key = of.key();
        let mut wanted = None;
        for (made, operand) in [(Along::Rows, rows), (Along::Cols, cols)] {
            let Some(operand) = operand else { continue };
            let copy = Fp8Copy::new(operand, layer);
            let held = match role {
                Role::Input => {
                    recent::push(copy.clone());
                    Held::Weak(Arc::downgrade(&copy))
                }
                Role::Weight if config.force_recompute_fp8_weight_in_bwd() => Held::Weak(Arc::downgrade(&copy)),
                Role::Weight | Role::GradOutput => Held::Strong(copy.clone()),
            };
            self.copies.push((key, made, held));
            if made == along {
                wanted = Some(copy);
            }
        }
        wanted.expect("fp8_quantize returns every orientation that it is asked for")
    }

    /// Casts `t` with the scale that its copies have already, else that of its history, else that of its own amax.
    fn quantize(&mut self, t: &Float8Tensor<B>, view: View<'_, B>, of: CastOf<'_>) -> Copies<B> {
        let CastOf { role, layer, .. } = of;
        let key = of.key();
        let at = self.known.iter().position(|(k, _)| *k == key);
        let known = at.map(|i| self.known[i].1.clone());
        let one_scale = key.cast.granularity == Granularity::Tensor;
        let state = || layer.group().device::<B>(&B::float_device(t.full()));
        let scaling = match &known {
            // Other granularities have other scales along the other axis.
            Some(known) if one_scale => Some(known.amaxes.scaling.clone()),
            None => key.delayed.and_then(|delayed| state().lock().histories.scaling_amax(layer.name(), role, delayed)),
            _ => None,
        };
        // With one scale the amax is the same whatever the orientation: the first cast observes it.
        let observes = scaling.is_none() || (key.delayed.is_some() && known.is_none());
        let from = match &scaling {
            Some(amax) => ScaleFrom::Amax { amax: amax.clone(), observe: observes },
            None => ScaleFrom::Own,
        };
        let (full, orientation) = match view {
            None => (t.full().clone(), of.orientation()),
            Some(view) => (view(), of.along.orientation()),
        };
        let copies = B::fp8_quantize(full, key.cast, orientation, from);
        let observed = match (&known, observes) {
            (Some(known), false) => known.amaxes.observed.clone(),
            _ => Some(copies.amax.clone()),
        };
        let amaxes = Amaxes { scaling: scaling.unwrap_or_else(|| copies.amax.clone()), observed };
        let history = match known {
            Some(known) => known.history,
            None => key.delayed.map(|delayed| {
                Arc::new(Observation {
                    state: state(),
                    layer: layer.name().into(),
                    role,
                    delayed,
                    initial: key.cast.format.max(),
                    amax: copies.amax.clone(),
                    is_told: AtomicBool::new(false),
                })
            }),
        };
        let known = Known { amaxes: Arc::new(amaxes), history };
        match at {
            Some(i) => self.known[i].1 = known,
            None => self.known.push((key, known)),
        }
        copies
    }
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
