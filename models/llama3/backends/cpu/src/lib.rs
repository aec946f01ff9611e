//! [`llama3::trainer::train`] on Burn's `Flex` in FP8: all that generic code, compiled for this backend.
//!
//! A library needs only the declarations of the crates it uses, so it is compiled beside them and beside the other
//! backends; a program would wait for all of them.
#![cfg(feature = "flex")]

use std::io::Write;

use burn::backend::{Autodiff, Flex};
use burn_float8::Float8;
use device_select::SelectedDevice;
use llama3::trainer::Outcome;
use llama3::{Error, RunConfig};

/// Trains as `config` says on the default device of `Flex`, which is `selected`, and writes the log to `out`.
///
/// # Errors
/// Any [`Error`].
pub fn train(config: &RunConfig, selected: &SelectedDevice, out: &mut dyn Write) -> Result<Outcome, Error> {
    llama3::trainer::train::<Autodiff<Float8<Flex>>>(config, selected, &Default::default(), out)
}
