//! Codes, scales and results of linears, against reference vectors and definitions in f64.
mod attention;
mod dtypes;
mod fp8_only;
mod fused;
mod gradients;
mod grouped;
mod host_casts;
mod lora;
mod nonfinite;
