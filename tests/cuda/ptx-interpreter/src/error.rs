//! [`Error`]: parse, launch and execution errors.

/// Error of a kernel or its launch. The text names the instruction, the thread or the argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX as NVRTC writes it.
    #[error("{0}")]
    Ptx(String),
    /// A driver would reject the launch, or its grid, arguments or tensor maps are not modelled.
    #[error("{0}")]
    Launch(String),
    /// The first fault: an access out of bounds or misaligned, misuse of a barrier, an instruction
    /// that is not modelled, a trap, or a deadlock.
    #[error("{0}")]
    Fault(String),
}
