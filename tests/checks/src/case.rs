//! One case: its name, what it measures and why it failed.

use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::prelude::*;
use float8_kernels::KernelError;

/// How much to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// Every kernel on matrices of a few hundred rows at most, for software devices.
    #[default]
    Small,
    /// Large matrices as well: a GPU takes a minute or a few.
    Full,
}

/// A case that has not run yet.
pub struct Case<'a> {
    /// Kernel, shape and the rest of the case, words separated by blanks; the first is the kernel.
    pub name: String,
    check: Box<dyn FnOnce() -> Result<f64, Failure> + 'a>,
}

impl<'a> Case<'a> {
    /// A case and what it does.
    pub fn new(name: impl fmt::Display, check: impl FnOnce() -> Result<f64, Failure> + 'a) -> Self {
        Self { name: name.to_string(), check: Box::new(check) }
    }

    /// The worst error relative to what the case allows, 0 to 1 (0 where bits are compared).
    ///
    /// # Errors
    /// What is wrong.
    pub fn run(self) -> Result<f64, Failure> {
        caught(self.check)
    }
}

/// Runs what may panic, as runtimes do where they have no error to return.
///
/// # Errors
/// Its own; a panic.
pub fn caught<V>(run: impl FnOnce() -> Result<V, Failure>) -> Result<V, Failure> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("without a message");
        Err(Failure::Panicked(text.into()))
    })
}

/// Why a case failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The library refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The device or its driver failed.
    #[error("device: {0}")]
    Device(String),
    /// The result differs from the reference.
    #[error("{0}")]
    Wrong(String),
    /// Something panicked on the way.
    #[error("panic: {0}")]
    Panicked(String),
}

/// [`Failure::Wrong`] with a formatted message.
macro_rules! wrong {
    ($($message:tt)*) => { $crate::Failure::Wrong(format!($($message)*)) };
}
pub(crate) use wrong;

/// Hands on the cases of a device.
pub(crate) struct Cases<'a, R: Runtime> {
    pub(crate) client: &'a ComputeClient<R>,
    size: Size,
    visit: &'a mut dyn FnMut(Case<'_>),
}

impl<'a, R: Runtime> Cases<'a, R> {
    pub(crate) fn new(client: &'a ComputeClient<R>, size: Size, visit: &'a mut dyn FnMut(Case<'_>)) -> Self {
        Self { client, size, visit }
    }

    /// `small` and, in full runs, `large`.
    pub(crate) fn sizes<T: Copy>(&self, small: &[T], large: &[T]) -> Vec<T> {
        let large = if self.size == Size::Full { large } else { &[] };
        small.iter().chain(large).copied().collect()
    }

    pub(crate) fn add(
        &mut self,
        name: impl fmt::Display,
        check: impl FnOnce(&ComputeClient<R>) -> Result<f64, Failure>,
    ) {
        let client = self.client;
        (self.visit)(Case::new(name, || check(client)));
    }
}
