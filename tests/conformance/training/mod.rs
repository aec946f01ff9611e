//! Whole steps: losses, delayed scaling, statistics, switches of precision.
mod delayed;
mod delayed_state;
mod golden_trajectory;
mod health;
mod recipes;
mod schedule;
