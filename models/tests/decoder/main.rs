//! The decoder without checkpoints: dimensions, the forward pass, rotary frequencies, experts.
#![allow(missing_docs)]

mod common;
mod configs;
mod forward;
mod gradients;
mod masks;
mod moe;
mod rope;
