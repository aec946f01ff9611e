//! What tells kernels of different versions of this crate apart.

/// A hash of this crate's sources, as an argument of every kernel: CubeCL's cache of compiled kernels, where it is on, outlives
/// the program, and keys a kernel by its name and compile-time arguments alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Version(&'static str);

/// This version's.
pub(crate) const VERSION: Version = Version(env!("FLOAT8_KERNELS_SOURCE"));
