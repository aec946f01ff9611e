//! Work of the decorator: casts, launches and saved tensors.
mod casts;
mod cuda_offline;
