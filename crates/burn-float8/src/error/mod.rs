//! What a user can get wrong, as errors and as panics of Burn's operations, which return none; fields carry the offending values.
mod device;

pub use device::{DeviceError, SelfCheckFailure};
use float8_kernels::{Format, Granularity, ScaleCalculationMode};

use crate::terms::{Gemm, Recipe};

/// What [`Float8Config`](crate::Float8Config), its application and the state of a run can refuse.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Float8Error {
    /// A pattern matches no linear of the model, or none that gets an adapter.
    #[error("{field}: {pattern:?} matches none of these {linears} linears: {names}")]
    FilterMatchesNothing {
        /// `filter_fqns`, `overrides.fqns`, `lora.target_modules`, `lora.rank_pattern` or `lora.alpha_pattern`.
        field: &'static str,
        /// The pattern as configured.
        pattern: String,
        /// How many linears it may match.
        linears: usize,
        /// Their names, shortened where there are many.
        names: String,
    },
    /// A pattern is not a valid glob.
    #[error("{field}: {pattern:?} is not a valid glob: {reason}")]
    InvalidGlob {
        /// `filter_fqns` or `overrides.fqns`.
        field: &'static str,
        /// The pattern as configured.
        pattern: String,
        /// The parser's message.
        reason: String,
    },
    /// The model has no linear at all.
    #[error(
        "the model has no linear layer (no float parameter `weight` of rank 2 inside a `Linear`), so no FP8 can run in it"
    )]
    NoLinears,
    /// Its shards follow from the casts that it was configured with.
    #[error("the model is sharded: another configuration is to be applied before Sharded::apply")]
    Sharded,
    /// Every linear is kept in high precision by the configuration.
    #[error("all {linears} linears are kept in high precision ({reasons}): nothing is left to run in FP8")]
    NothingConverted {
        /// How many linears the model has.
        linears: usize,
        /// What keeps them.
        reasons: String,
    },
    /// More layers are to stay in high precision than there are numbered ones.
    #[error(
        "num_layers_at_start_in_high_precision = {start} and num_layers_at_end_in_high_precision = {end}, but the \
         names of the model's linears count {layers} layers"
    )]
    TooFewLayers {
        /// Layers asked for at the start.
        start: usize,
        /// Layers asked for at the end.
        end: usize,
        /// Layers that names number.
        layers: usize,
    },
    /// A cast in a configuration file lacks a field.
    #[error("missing field `{field}`: a cast that is not disabled names its scaling_granularity and target_dtype")]
    MissingCastField {
        /// The field.
        field: &'static str,
    },
    /// An override names no linears.
    #[error("overrides: fqns is empty, so the override is for no linear")]
    EmptyOverride,
    /// No recipe has this name.
    #[error("unknown recipe {name:?}: expected one of {}", Recipe::ALL.map(Recipe::name).join(", "))]
    UnknownRecipe {
        /// The name.
        name: String,
    },
    /// A custom layer type is not in the model.
    #[error("module_types: the model has no parameter of rank 2 that {name:?} names")]
    ModuleTypeMatchesNothing {
        /// As configured.
        name: String,
    },
    /// No configuration was applied to the model.
    #[error("no configuration was applied to the model, so it has no FP8 state: call `Float8Config::apply` first")]
    NotApplied,
    /// A custom layer type is neither `Type` nor `Type.parameter`.
    #[error("module_types: {name:?} is neither the name of a module's type nor Type.parameter")]
    ModuleType {
        /// As configured.
        name: String,
    },
    /// One operand of a GEMM is cast and the other is not.
    #[error("{gemm} cannot run in two precisions: {disabled} is disabled and {enabled} is not")]
    HalfDisabledGemm {
        /// The GEMM.
        gemm: Gemm,
        /// The field that is disabled.
        disabled: &'static str,
        /// The field that is not.
        enabled: &'static str,
    },
    /// An operand has different formats in its two GEMMs.
    #[error("{operand} must have one target_dtype in both of its GEMMs, not {} and {}", dtypes[0], dtypes[1])]
    OperandDtypes {
        /// `input`, `weight` or `grad_output`.
        operand: &'static str,
        /// The formats.
        dtypes: [Format; 2],
    },
    /// Delayed scaling has one scale per tensor.
    #[error("{operand}: delayed scaling is tensorwise, not {granularity}")]
    DelayedGranularity {
        /// The field.
        operand: &'static str,
        /// Its granularity.
        granularity: Granularity,
    },
    /// A parameter of delayed scaling is out of range.
    #[error("delayed_scaling.{field} = {value}: must be {range}")]
    DelayedScaling {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        range: &'static str,
    },
    /// A mode of MX scales without a cast that has such scales.
    #[error(
        "scale_calculation_mode = {mode} with recipe {recipe}: no cast is of 1x32, so nothing uses it (an override has \
         its own)"
    )]
    ScaleCalculationModeWithoutMx {
        /// The recipe that the casts started from.
        recipe: Recipe,
        /// The mode.
        mode: ScaleCalculationMode,
    },
    /// Squares of scales without a cast of a weight that has such scales.
    #[error(
        "mx_square_weights with recipe {recipe}: no weight is cast by 1x32, so nothing uses it (an override has its own)"
    )]
    SquareWeightsWithoutMx {
        /// The recipe that the casts started from.
        recipe: Recipe,
    },
    /// Delayed scaling was asked for linears without a name.
    #[error("delayed scaling keeps a history for each layer: apply the configuration to a model to give them names")]
    DelayedWithoutLayers,
    /// Every cast is disabled.
    #[error("all six casts are disabled: nothing is left to run in FP8")]
    AllDisabled,
    /// Statistics every zero steps.
    #[error("statistics.every_n_steps must be at least 1")]
    StatisticsEveryZero,
    /// What delayed scaling would have given depends on a history that a layer of another recipe does not have.
    #[error("statistics.compare cannot contain delayed: its scales depend on a history")]
    CompareDelayed,
    /// A fallback needs something to look at.
    #[error("fallback needs statistics: set statistics.every_n_steps")]
    FallbackWithoutStatistics,
    /// A fallback without a limit never happens.
    #[error("fallback has no limit: set min_sqnr_db, max_saturated, max_flushed or max_non_finite")]
    FallbackWithoutLimit,
    /// A limit is out of range.
    #[error("{field} = {value}: must be from 0 to below {largest}")]
    FallbackLimit {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The largest that it may be.
        largest: f64,
    },
    /// A part of a precision schedule is out of range.
    #[error("{field} = {value}: must be {range}")]
    Schedule {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        range: &'static str,
    },
    /// A GEMM ran, or would have run, in high precision that nobody asked for.
    #[error("{layer}: {gemm} in high precision, unrequested: {reason}")]
    UnrequestedHighPrecision {
        /// The layer's name.
        layer: String,
        /// The GEMM.
        gemm: Gemm,
        /// Why.
        reason: String,
    },
    /// Linears of the model have lost their layers, or never had them.
    #[error(
        "{linears} linears of the model carry no layer, so that no configuration applies to them: {names}. A record that is loaded into a \
         model without FP8 layers, such as a valid() one, a quantized copy, and weights rebuilt from data have none: apply the configuration to what it is to run with"
    )]
    UntaggedLinears {
        /// How many.
        linears: usize,
        /// Their names, shortened where there are many.
        names: String,
    },
    /// A layer was never called as a linear.
    #[error(
        "{layer}: converted to FP8, but never called as a linear{}",
        if *weight_matmuls == 0 { String::new() } else { format!(
            "; Tensor::matmul read its weight {weight_matmuls} times: set matmul = true to run these in FP8, or filter it"
        ) }
    )]
    NeverCalled {
        /// The layer's name.
        layer: String,
        /// How often `Tensor::matmul` read its weight.
        weight_matmuls: u64,
    },
    /// The device cannot run FP8, or a kernel is wrong there.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A parameter of adapters is out of range.
    #[error("lora.{field} = {value}: must be {range}")]
    Lora {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        range: &'static str,
    },
    /// Codes are not the weight of a linear of the model.
    #[error("{layer}: FP8 codes {what}")]
    Codes {
        /// The layer's name.
        layer: String,
        /// What is wrong with them, with the values.
        what: String,
    },
    /// A weight without high-precision values is to be trained.
    #[error("{}", Float8Panic::Fp8OnlyTrained { layer: layer.clone() })]
    Fp8OnlyTrained {
        /// The layer's name.
        layer: String,
    },
    /// A saved state does not belong to the model.
    #[error("the state names {layer:?}, which is no converted linear of the model")]
    StateLayer {
        /// The name in the state.
        layer: String,
    },
    /// A saved state has another shape than the model's.
    #[error("the state of {layer}: {what}")]
    StateMismatch {
        /// The layer's name.
        layer: String,
        /// What differs, with the values.
        what: String,
    },
}

/// What Burn's operations, which return no errors, panic with in these words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Float8Panic {
    /// `Autodiff<Float8<B>>` came to its first backward.
    #[error(
        "Float8 wraps the backend that you train with: write `Float8<Autodiff<B>>` in place of `Autodiff<Float8<B>>`"
    )]
    WrongOrder,
    /// What a process has of a sharded weight or its gradient is some rows.
    #[error(
        "{layer}: its weight is sharded, and Tensor::matmul would read this rank's rows of it, or of its gradient, as a whole matrix. A \
         weight that is used without nn::Linear or nn::Embedding, such as a tied output, is to go through float8_shard::full_tensor; \
         an optimizer that multiplies gradients, such as Muon, does not work on shards"
    )]
    ShardedMatmul {
        /// The layer's name.
        layer: String,
    },
    /// `float8_shard::full_tensor` puts rows together, and was given something else that was computed from a shard.
    #[error("{layer}: full_tensor is of a shard {rows:?}, not of {got:?}: transpose or slice the whole weight instead")]
    NotRows {
        /// The layer's name.
        layer: String,
        /// The shape that was given.
        got: Vec<usize>,
        /// The shape of a shard.
        rows: [usize; 2],
    },
    /// The device cannot run FP8, or has lost results.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A linear's weight carries no layer, and an applied configuration says `untagged = "error"`.
    #[error(
        "a linear with weight {weight:?} carries no layer: it was not in the model that Float8Config was applied to"
    )]
    UntaggedLinear {
        /// `[K, N]`
        weight: [usize; 2],
    },
    /// Adapters are beside linears of a Float8 backend.
    #[error("adapters are attached to models on a Float8 backend alone: `Float8<Autodiff<B>>`, or `Float8<B>`")]
    NotFloat8,
    /// A weight without high-precision values was to be trained.
    #[error(
        "{layer}: its weight is FP8 codes alone, which no optimizer updates: freeze it (`no_grad`) and train an adapter, or keep the \
         high-precision values"
    )]
    Fp8OnlyTrained {
        /// The layer's name.
        layer: String,
    },
    /// Rows, weights and ends of a grouped linear do not fit each other.
    #[error(
        "a grouped linear of x {x:?}, weight {weight:?} and {ends} ends: x is [M, K], the weight [G, K, N], ends are G"
    )]
    GroupedShapes {
        /// The shape of x.
        x: [usize; 2],
        /// The shape of the weight.
        weight: [usize; 3],
        /// Number of ends.
        ends: usize,
    },
    /// Shapes of attention that do not fit.
    #[error(
        "attention of query {query:?}, key {key:?}, value {value:?} and documents {documents:?}: they are [B, H, T, d], [B, KV, S, d], \
         [B, KV, S, e] and, if there are some, [B, T]; H is a multiple of KV, T is S with documents, and none is 0"
    )]
    AttentionShapes {
        /// The shape of the query.
        query: [usize; 4],
        /// The shape of the key.
        key: [usize; 4],
        /// The shape of the value.
        value: [usize; 4],
        /// The shape of the documents.
        documents: Option<[usize; 2]>,
    },
}

/// An error, and the model that it kept from being converted or sharded, as it was.
pub struct ApplyError<M, E = Float8Error> {
    /// What is wrong.
    pub error: E,
    /// The model.
    pub model: Box<M>,
}

impl<M, E: core::fmt::Debug> core::fmt::Debug for ApplyError<M, E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ApplyError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M, E: core::fmt::Display> core::fmt::Display for ApplyError<M, E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.error.fmt(f)
    }
}

impl<M, E: core::fmt::Debug + core::fmt::Display> core::error::Error for ApplyError<M, E> {}

impl<M> From<ApplyError<M>> for Float8Error {
    fn from(error: ApplyError<M>) -> Self {
        error.error
    }
}
