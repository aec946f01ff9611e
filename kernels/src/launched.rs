//! Which kernels a call launches on its thread, so that each can be checked the first time that it runs; and what tells those of
//! different versions of this crate apart.

use core::cell::RefCell;
use core::hash::{BuildHasher, Hash};
use std::hash::{BuildHasherDefault, DefaultHasher};

use cubecl::prelude::*;

use crate::arch::{CudaArch, cuda_arch};

thread_local! {
    static LAUNCHED: RefCell<Option<Vec<KernelVariant>>> = const { RefCell::new(None) };
}

/// A kernel of this crate with its compile-time parameters: what is compiled once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelVariant {
    /// The kernel's name.
    pub name: &'static str,
    /// A hash of the parameters.
    parameters: u64,
}

/// What `call` gives, and the kernels of this crate that it has launched.
pub fn launched_by<T>(call: impl FnOnce() -> T) -> (T, Vec<KernelVariant>) {
    /// Puts back what was there, also if `call` panics.
    struct Outer(Option<Vec<KernelVariant>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            LAUNCHED.set(self.0.take());
        }
    }
    let _outer = Outer(LAUNCHED.replace(Some(vec![])));
    let result = call();
    (result, LAUNCHED.take().unwrap_or_default())
}

/// A hash that is the same for equal values, in this process.
pub(crate) fn hash_of(value: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

/// An argument of every kernel, for CubeCL's cache of compiled kernels, which outlives the program. The cache keys a kernel by
/// its name and compile-time arguments alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Version {
    /// A hash of this crate's sources.
    sources: &'static str,
    /// The CUDA architecture, bytes of shared memory, and SMs. The latter tell devices apart that have the same features: code for
    /// sm_100a runs on no sm_103, and code for sm_86 on no sm_80.
    device: Option<(CudaArch, usize, Option<u32>)>,
}

impl Version {
    /// The argument for this client's device.
    pub(crate) fn of<R: Runtime>(client: &ComputeClient<R>) -> Self {
        let hardware = &client.properties().hardware;
        let device = |arch| (arch, hardware.max_shared_memory_size, hardware.num_streaming_multiprocessors);
        Self { sources: env!("FLOAT8_KERNELS_SOURCE"), device: cuda_arch(client).map(device) }
    }
}

/// The [`Version`] for a launch. [`launched_by`] reports the launch.
pub(crate) fn note<R: Runtime>(client: &ComputeClient<R>, name: &'static str, parameters: impl Hash) -> Version {
    LAUNCHED.with_borrow_mut(|launched| {
        if let Some(launched) = launched {
            launched.push(KernelVariant { name, parameters: hash_of(parameters) });
        }
    });
    Version::of(client)
}
