//! Ordinary Burn programs with FP8 linears: each test uses Burn's modules, optimizers, learner or
//! stores.
mod support;

mod computed_weights;
mod config;
mod evaluation;
mod frozen;
mod graphs;
mod learner;
mod modules;
mod monitoring;
mod nodes;
mod optimizers;
mod panics;
mod precision;
mod quantized;
mod records;
mod silence;
mod store;
mod strict;
mod untagged;
