//! [`llama3::trainer::train`] on each of Burn's backends: all that generic code, compiled for them.
//!
//! A library is compiled as soon as the declarations of what it uses are known, so beside burn-flex; a program waits for
//! all their code. One library for all: the GPU backends share a lot of it, which two would compile twice.

use std::io::Write;

use device_select::SelectedDevice;
use llama3::{Error, RunConfig};

macro_rules! backend {
    ($function:ident, $backend:ident, $device:literal, $feature:literal) => {
        /// Trains as `config` says on the default device of this backend, which is `selected`, and writes the log to `out`.
        ///
        /// # Errors
        /// Any [`Error`]; [`Error::FeatureOff`] where the backend is not compiled.
        #[cfg(feature = $feature)]
        pub fn $function(selected: &SelectedDevice, config: &RunConfig, out: &mut dyn Write) -> Result<(), Error> {
            type Decorated = burn::backend::Autodiff<burn_float8::Float8<burn::backend::$backend>>;
            llama3::trainer::train::<Decorated>(config, selected, &Default::default(), out).map(|_| ())
        }

        /// Is [`Error::FeatureOff`]: the backend is not compiled.
        ///
        /// # Errors
        /// Always.
        #[cfg(not(feature = $feature))]
        pub fn $function(_: &SelectedDevice, _: &RunConfig, _: &mut dyn Write) -> Result<(), Error> {
            Err(Error::FeatureOff { device: $device, feature: $feature })
        }
    };
}

backend!(on_cpu, Flex, "cpu", "flex");
backend!(on_wgpu, Wgpu, "wgpu", "wgpu");
backend!(on_cuda, Cuda, "cuda", "cuda");
