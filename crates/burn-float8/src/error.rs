//! One error type for everything that a user can get wrong; its fields carry the offending values.

/// What [`Float8Config`](crate::Float8Config) and its application can refuse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Float8Error {
    /// A name in `filter_fqns` matches no linear of the model.
    #[error("filter_fqns: {pattern:?} matches none of the model's {linears} linears: {names}")]
    FilterMatchesNothing {
        /// The pattern as configured.
        pattern: String,
        /// How many linears the model has.
        linears: usize,
        /// Their names, shortened where there are many.
        names: String,
    },
    /// A name in `filter_fqns` is not a valid glob.
    #[error("filter_fqns: {pattern:?} is not a valid glob: {reason}")]
    InvalidGlob {
        /// The pattern as configured.
        pattern: String,
        /// The parser's message.
        reason: String,
    },
    /// The model has no linear at all.
    #[error(
        "the model has no linear layer (no parameter `weight` of rank 2 inside a `Linear`), so no FP8 can run in it"
    )]
    NoLinears,
    /// Every linear is kept in high precision by the configuration.
    #[error("filter_fqns {patterns:?} keeps all {linears} linears in high precision: nothing is left to run in FP8")]
    NothingConverted {
        /// The patterns as configured.
        patterns: Vec<String>,
        /// How many linears the model has.
        linears: usize,
    },
}
