//! One case: its name, its check and its failure.

use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{KernelError, supports};

use crate::data::{DTYPES, F32};

/// Size of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// Every kernel on small matrices, for software devices.
    #[default]
    Small,
    /// Large matrices too; a GPU takes one to a few minutes.
    Full,
}

/// Name of a variant in case names: `OneNan` becomes `one-nan`.
pub(crate) fn kebab(variant: &impl fmt::Debug) -> String {
    let mut name = String::new();
    for c in format!("{variant:?}").chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.extend(c.to_lowercase());
    }
    name
}

/// All pairs of two elements, in order.
pub(crate) fn pairs<T: Copy, const N: usize>(all: [T; N]) -> impl Iterator<Item = [T; 2]> {
    all.into_iter().flat_map(move |a| all.map(|b| [a, b]))
}

/// A case that has not run yet.
pub struct Case<'a> {
    /// Kernel, shape and further words, separated by spaces. The first word is the kernel.
    pub name: String,
    check: Box<dyn FnOnce() -> Result<f64, Failure> + 'a>,
}

impl<'a> Case<'a> {
    /// Creates a case from its name and its check.
    pub fn new(name: impl fmt::Display, check: impl FnOnce() -> Result<f64, Failure> + 'a) -> Self {
        Self { name: name.to_string(), check: Box::new(check) }
    }

    /// Runs the check. Returns the worst error as a share of the allowed error, from 0 to 1; 0
    /// where bits are compared.
    ///
    /// # Errors
    /// The failure of the check. A panic becomes [`Failure::Panicked`].
    pub fn run(self) -> Result<f64, Failure> {
        caught(self.check)
    }
}

/// Runs `run` and catches panics, which runtimes raise where they have no error to return.
///
/// # Errors
/// The error of `run`, or [`Failure::Panicked`].
pub fn caught<V>(run: impl FnOnce() -> Result<V, Failure>) -> Result<V, Failure> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("without a message");
        Err(Failure::Panicked(text.into()))
    })
}

/// Failure of a case.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The library returned an error.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The device or its driver failed.
    #[error("device: {0}")]
    Device(String),
    /// The result differs from the reference.
    #[error("{0}")]
    Wrong(String),
    /// The case panicked.
    #[error("panic: {0}")]
    Panicked(String),
}

/// [`Failure::Wrong`] with a formatted message.
macro_rules! wrong {
    ($($message:tt)*) => { $crate::Failure::Wrong(format!($($message)*)) };
}
pub(crate) use wrong;

/// Passes the cases of a device to `visit`.
pub(crate) struct Cases<'a, R: Runtime> {
    pub(crate) client: &'a ComputeClient<R>,
    size: Size,
    visit: &'a mut dyn FnMut(Case<'_>),
}

impl<'a, R: Runtime> Cases<'a, R> {
    pub(crate) fn new(client: &'a ComputeClient<R>, size: Size, visit: &'a mut dyn FnMut(Case<'_>)) -> Self {
        Self { client, size, visit }
    }

    /// `small`, and `large` in full runs.
    pub(crate) fn sizes<T: Copy>(&self, small: &[T], large: &[T]) -> Vec<T> {
        let large = if self.size == Size::Full { large } else { &[] };
        small.iter().chain(large).copied().collect()
    }

    /// Dtypes that the device stores.
    pub(crate) fn dtypes(&self) -> Vec<StorageType> {
        DTYPES.into_iter().filter(|dtype| supports(self.client, *dtype)).collect()
    }

    /// The last of [`dtypes`](Self::dtypes): bf16, if the device stores it.
    pub(crate) fn half(&self) -> StorageType {
        self.dtypes().pop().unwrap_or(F32)
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
