//! How the decorator gets its results: what is cast and launched, and what is kept.
mod casts;
mod cuda_offline;
mod fused;
mod saved;
