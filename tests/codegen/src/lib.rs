//! CUDA without a GPU: a CubeCL runtime that generates each kernel's C++ on the real launch path and runs nothing
//! ([`device`]), NVRTC from a folder of wheels or a toolkit ([`nvrtc`]), and what the machine code says ([`sass`]).

pub mod device;
pub mod expected;
pub mod interpret;
mod launch;
pub mod nvrtc;
pub mod sass;
mod server;
pub mod variants;
