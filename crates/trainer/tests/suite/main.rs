//! The crate's tests as one binary, with a module per topic.
#![allow(missing_docs)]

mod activations;
mod checkpoints;
mod commands;
mod common;
mod exports;
mod float8_broken;
mod float8_configs;
mod float8_exports;
mod float8_imports;
mod float8_python;
mod float8_refusals;
mod float8_runs;
mod fp8_only;
mod generation;
mod gradients;
mod held_out;
mod hf_configs;
mod lora;
mod memory_plans;
mod moe_training;
mod precision_schedules;
mod profiles;
mod refusals;
mod reports;
mod resuming;
mod rounding;
mod run_configs;
mod schedules;
#[path = "../harness/table.rs"]
mod table;
mod training;
mod watching;
mod weight_decay;
