//! Whole steps: losses, delayed scaling, statistics and precision switches.
mod adamw;
mod delayed;
mod delayed_state;
mod golden_llama;
mod health;
mod recipes;
mod schedule;
