//! Codes, scales and results of linears, against reference vectors and definitions in f64.
mod attention;
mod dtypes;
mod fused;
mod golden_linear;
mod golden_llama;
mod golden_quantize;
mod gradients;
mod grouped;
mod mx;
mod nonfinite;
mod properties;
mod shapes;
