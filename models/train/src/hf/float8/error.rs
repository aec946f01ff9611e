//! [`Float8FilesError`]: errors in FP8 weights of files, and reasons against writing them.

use std::path::PathBuf;

/// Error in FP8 weights of files, or reason against writing them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Float8FilesError {
    /// Codes without a configuration of their scales.
    #[error("{}: {name} holds FP8 codes, and no quantization_config in config.json says how they are scaled", path.display())]
    NoConfig {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
    },
    /// Codes of a weight that the configuration has in high precision.
    #[error("{}: {name} holds FP8 codes, but by quantization_config {module} is not quantized", path.display())]
    NotQuantized {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Its linear.
        module: String,
    },
    /// Codes without their scale, or without the scale of the inputs.
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
        /// The file that has the first one.
        path: PathBuf,
        /// Name of the first one.
        one: String,
        /// Name of the second one.
        other: String,
    },
    /// A scale whose shape does not match its weight.
    #[error("{}: {name} has shape {found:?}, for a weight {weight:?} it must be {}", path.display(), any_of(expected))]
    ScaleShape {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape of the weight, `[out, in]`.
        weight: [usize; 2],
        /// Valid shapes.
        expected: Vec<Vec<usize>>,
    },
    /// A scale in an unsupported dtype.
    #[error("{}: {name} has dtype {dtype}; {expected} are read", path.display())]
    ScaleDtype {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// Dtype in the file.
        dtype: String,
        /// Supported dtypes.
        expected: &'static str,
    },
    /// A scale that is negative, infinite, NaN, or zero for codes that are not all zero.
    #[error("{}: {name} has {value} at {index}, and scales of codes that are not all 0 are positive and finite", path.display())]
    ScaleValue {
        /// The file.
        path: PathBuf,
        /// The scale.
        name: String,
        /// Index in the row-major tensor.
        index: usize,
        /// Value of the scale.
        value: f32,
    },
    /// A code that is NaN.
    #[error("{}: {name} has the code {code:#04x}, which is NaN, in row {row}, column {col}", path.display())]
    NanCode {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Row of the code.
        row: usize,
        /// Column of the code.
        col: usize,
        /// `0x7f` or `0xff`.
        code: u8,
    },
    /// A code whose value, multiplied by its scale, exceeds f32.
    #[error("{}: {name} is beyond f32 in row {row}, column {col}: the code {code:#04x} with the scale {scale:e}", path.display())]
    Overflow {
        /// The file.
        path: PathBuf,
        /// The weight.
        name: String,
        /// Row of the code.
        row: usize,
        /// Column of the code.
        col: usize,
        /// The code.
        code: u8,
        /// Scale of the code.
        scale: f32,
    },
    /// A pattern of names that cannot be matched.
    #[error("{}: {key}: the pattern {pattern:?} cannot be matched: {reason}", path.display())]
    Pattern {
        /// The `config.json`.
        path: PathBuf,
        /// Key that holds it.
        key: String,
        /// The pattern.
        pattern: String,
        /// Problem with the pattern.
        reason: String,
    },
    /// A linear whose cast has no format in files.
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
    /// A linear whose size does not fit its recipe's format.
    #[error(
        "{layer}: {axis} = {size} is no multiple of {multiple}, as {reader} wants it of {format} weights: choose --recipe rowwise, or keep \
         the linear, and those that vLLM joins with it (q, k and v; gate and up), in high precision by float8.filter_fqns"
    )]
    Ragged {
        /// The linear.
        layer: String,
        /// `in` or `out`.
        axis: &'static str,
        /// Size of the axis.
        size: usize,
        /// Required divisor of the size.
        multiple: usize,
        /// Program that requires it.
        reader: &'static str,
        /// The format.
        format: &'static str,
    },
    /// Linears in several formats, while a folder has one.
    #[error(
        "{layer} is written as {format}, and {other} as {other_format}: a folder has one format: choose one for all with --recipe, or keep \
         the linears of one in high precision by float8.filter_fqns"
    )]
    Mixed {
        /// The first linear.
        layer: String,
        /// Its format.
        format: String,
        /// The second linear.
        other: String,
        /// Its format.
        other_format: String,
    },
    /// Linears that readers join into one, but not all of them are in FP8.
    #[error(
        "{layer} is in FP8 and {other} in high precision, and vLLM runs them as one: quantize both, or keep both in high precision by \
         float8.filter_fqns"
    )]
    Fused {
        /// The linear in FP8.
        layer: String,
        /// The linear in high precision.
        other: String,
    },
    /// An output layer that would be written in FP8.
    #[error("{layer}: vLLM reads output layers in high precision only: name it in float8.filter_fqns")]
    OutputLayer {
        /// Its name.
        layer: String,
    },
    /// A linear whose inputs have no amax yet to make their scale from.
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
        /// Index of the element, row-major.
        index: usize,
        /// Value of the element.
        value: f32,
    },
    /// No linear would be in FP8.
    #[error("no linear of the model is to be in FP8: choose another format, or other float8.filter_fqns")]
    Nothing,
}

fn any_of(shapes: &[Vec<usize>]) -> String {
    shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" or ")
}
