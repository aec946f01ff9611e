//! [`float8_autocast`]: switches FP8 on or off for a closure.
use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f` with FP8 off for all linears, or on again inside a closure with FP8 off. It applies
/// only to linears whose forward runs in the closure on this thread. Other threads and later calls
/// are not affected. A linear's backward follows its forward, wherever it runs, like `enabled` of
/// TransformerEngine's `autocast`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::Flex;
/// use burn::nn::LinearConfig;
/// use burn::tensor::Tensor;
/// use burn_float8::{Float8, Float8Config, float8_autocast, report};
/// type B = Float8<Flex>;
///
/// let device = Default::default();
/// let model = Float8Config::tensorwise().apply(LinearConfig::new(8, 8).init::<B>(&device)).unwrap().0;
/// float8_autocast(false, || model.forward(Tensor::<B, 2>::ones([4, 8], &device)));
/// assert_eq!(report(&model).totals().high_precision, 1);
/// # }
/// ```
///
#[doc = include_str!("switches.md")]
pub fn float8_autocast<T>(enabled: bool, f: impl FnOnce() -> T) -> T {
    /// Restores the setting when the closure ends, also on a panic.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ENABLED.set(self.0);
        }
    }
    let _restore = Restore(ENABLED.replace(enabled));
    f()
}

pub(crate) fn is_autocast_enabled() -> bool {
    ENABLED.get()
}
