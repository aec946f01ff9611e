//! Configurations, and what is wrong with some.
mod errors;
mod files;
