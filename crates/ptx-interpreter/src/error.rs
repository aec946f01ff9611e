//! [`Error`]: why a kernel was not run to its end.

/// What is wrong with a kernel or its launch, each in words that name the instruction, the thread or the argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX as NVRTC writes it.
    #[error("{0}")]
    Ptx(String),
    /// A driver would refuse the launch, or it has what is not modelled: its grid, its arguments, a tensor map.
    #[error("{0}")]
    Launch(String),
    /// The first fault: an access out of bounds or misaligned, a misuse of a barrier, an instruction that is not modelled, a trap,
    /// a deadlock.
    #[error("{0}")]
    Fault(String),
}
