//! The crate's tests as one binary, a module per topic.
#![allow(missing_docs)]

mod checkpoints;
mod common;
mod configs;
mod data;
mod generation;
mod gradients;
mod hf_configs;
mod metrics;
mod models;
mod rope;
mod run_configs;
mod schedules;
mod training;
