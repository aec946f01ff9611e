//! Configurations and their errors.
mod errors;
mod files;
