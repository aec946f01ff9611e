//! One case: its name, what it measured or why it failed.

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

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How much.
    pub size: Size,
    /// Only cases whose name contains this.
    pub only: Option<String>,
}

/// What became of a case.
#[derive(Debug)]
pub struct Outcome {
    /// Kernel, shape and the rest of the case, words separated by blanks; the first is the kernel.
    pub name: String,
    /// The worst error relative to what the case allows, 0 to 1 (0 where bits are compared), or what is wrong.
    pub detail: Result<f64, Failure>,
}

impl Outcome {
    /// Of a case that may panic: runtimes do where they have no error to return.
    pub fn of(name: String, check: impl FnOnce() -> Result<f64, Failure>) -> Self {
        let detail = catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("without a message");
            Err(Failure::Panicked(text.into()))
        });
        Self { name, detail }
    }
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

/// Runs cases and hands on their outcomes.
pub(crate) struct Runner<'a, R: Runtime> {
    pub(crate) client: &'a ComputeClient<R>,
    options: &'a Options,
    each: &'a mut dyn FnMut(Outcome),
}

impl<'a, R: Runtime> Runner<'a, R> {
    pub(crate) fn new(client: &'a ComputeClient<R>, options: &'a Options, each: &'a mut dyn FnMut(Outcome)) -> Self {
        Self { client, options, each }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.options.size == Size::Full
    }

    /// `small` and, in full runs, `large`.
    pub(crate) fn sizes<T: Copy>(&self, small: &[T], large: &[T]) -> Vec<T> {
        let large = if self.is_full() { large } else { &[] };
        small.iter().chain(large).copied().collect()
    }

    /// Runs a case, if it is among those asked for.
    pub(crate) fn case(
        &mut self,
        name: impl fmt::Display,
        check: impl FnOnce(&ComputeClient<R>) -> Result<f64, Failure>,
    ) {
        let name = name.to_string();
        if self.options.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            return;
        }
        let client = self.client;
        (self.each)(Outcome::of(name, || check(client)));
    }
}
