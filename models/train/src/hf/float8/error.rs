//! [`Float8FilesError`]: what can be wrong with FP8 weights in files, or stands against writing them.

use std::path::PathBuf;

/// What can be wrong with FP8 weights in files, or stands against writing them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Float8FilesError {
    /// Codes of which nothing says how they are scaled.
    #[error("{}: {name} holds FP8 codes, and no quantization_config in config.json says how they are scaled", path.display())]
    NoConfig {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
    },
    /// Codes of a weight that is said to be in high precision.
    #[error("{}: {name} holds FP8 codes, but by quantization_config {module} is not quantized", path.display())]
    NotQuantized {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Its linear.
        module: String,
    },
    /// Codes without their scale, or without that of the inputs.
    #[error("{}: {name} holds FP8 codes, and its scale {scale} is not there", path.display())]
    ScaleMissing {
        /// The file that has the codes.
        path: PathBuf,
        /// The weight.
        name: String,
        /// The scale.
        scale: String,
    },
    /// Two tensors that are the same scale under an older and a newer name.
    #[error("{}: {one} and {other} are two names of one scale", path.display())]
    ScaleTwice {
        /// The file that has the one.
        path: PathBuf,
        /// The one.
        one: String,
        /// The other.
        other: String,
    },
    /// A scale of another shape than its weight asks for.
    #[error("{}: {name} has shape {found:?}, for a weight {weight:?} it must be {}", path.display(), any_of(expected))]
    ScaleShape {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// What the file holds.
        found: Vec<usize>,
        /// `[out, in]`.
        weight: [usize; 2],
        /// The shapes that it may have.
        expected: Vec<Vec<usize>>,
    },
    /// A scale in a dtype that is not read.
    #[error("{}: {name} has dtype {dtype}; {expected} are read", path.display())]
    ScaleDtype {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// The dtype in the file.
        dtype: String,
        /// Those that it may have.
        expected: &'static str,
    },
    /// A scale that is negative, infinite, NaN, or zero with other codes than zeros.
    #[error("{}: {name} has {value} at {index}, and scales of codes that are not all 0 are positive and finite", path.display())]
    ScaleValue {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// Place in the row-major tensor.
        index: usize,
        /// What stands there.
        value: f32,
    },
    /// A code that is no number.
    #[error("{}: {name} has the code {code:#04x}, which is NaN, in row {row}, column {col}", path.display())]
    NanCode {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
        /// `0x7f` or `0xff`.
        code: u8,
    },
    /// A code that is beyond f32 with its scale.
    #[error("{}: {name} is beyond f32 in row {row}, column {col}: the code {code:#04x} with the scale {scale:e}", path.display())]
    Overflow {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
        /// The code.
        code: u8,
        /// What multiplies its value.
        scale: f32,
    },
    /// A pattern of names that cannot be matched.
    #[error("{}: {key}: the pattern {pattern:?} cannot be matched: {reason}", path.display())]
    Pattern {
        /// The `config.json`.
        path: PathBuf,
        /// The key that it stands in.
        key: String,
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A linear whose cast no format of files has.
    #[error(
        "{layer}: no format of files has {what}: choose --recipe rowwise, or keep the linear, and those that vLLM joins with it, in high \
         precision by float8.filter_fqns"
    )]
    NoFormat {
        /// The linear.
        layer: String,
        /// The cast.
        what: String,
    },
    /// A linear whose size its recipe's format does not take.
    #[error(
        "{layer}: {axis} = {size} is no multiple of {multiple}, as {reader} wants it of {format} weights: choose --recipe rowwise, or keep \
         the linear, and those that vLLM joins with it (q, k and v; gate and up), in high precision by float8.filter_fqns"
    )]
    Ragged {
        /// The linear.
        layer: String,
        /// `in` or `out`.
        axis: &'static str,
        /// Its size.
        size: usize,
        /// What must divide it.
        multiple: usize,
        /// Who says so.
        reader: &'static str,
        /// The format.
        format: &'static str,
    },
    /// Linears in several formats, of which a folder has one.
    #[error(
        "{layer} is written as {format}, and {other} as {other_format}: a folder has one format: choose one for all with --recipe, or keep \
         the linears of one in high precision by float8.filter_fqns"
    )]
    Mixed {
        /// The one linear.
        layer: String,
        /// Its format.
        format: String,
        /// The other linear.
        other: String,
        /// Its format.
        other_format: String,
    },
    /// Linears that readers join into one, and that are not all in FP8.
    #[error(
        "{layer} is in FP8 and {other} in high precision, and vLLM runs them as one: quantize both, or keep both in high precision by \
         float8.filter_fqns"
    )]
    Fused {
        /// The one in FP8.
        layer: String,
        /// The one in high precision.
        other: String,
    },
    /// An output layer that would be in FP8.
    #[error("{layer}: vLLM reads output layers in high precision only: name it in float8.filter_fqns")]
    OutputLayer {
        /// Its name.
        layer: String,
    },
    /// A linear whose inputs have no amax yet, of which their scale could be made.
    #[error(
        "{layer}: there is no amax history of its inputs, of which their scale is made: export a run that was trained by `delayed`, or \
         choose --recipe tensorwise"
    )]
    NoHistory {
        /// The linear.
        layer: String,
    },
    /// A weight that holds NaN or an infinity.
    #[error("{name} is {value} at element {index}: it has no FP8 codes")]
    NotFinite {
        /// The weight.
        name: String,
        /// Where in it, row-major.
        index: usize,
        /// What is there.
        value: f32,
    },
    /// No linear would be in FP8.
    #[error("no linear of the model is to be in FP8: choose another format, or other float8.filter_fqns")]
    Nothing,
}

fn any_of(shapes: &[Vec<usize>]) -> String {
    shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" or ")
}
