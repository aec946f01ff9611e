//! Whole steps: losses, delayed scaling, statistics, switches of precision.
mod delayed;
mod golden_trajectory;
mod health;
mod recipes;
mod schedule;
