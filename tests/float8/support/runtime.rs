//! The runtimes of this machine.
use burn::backend::wgpu::WgpuRuntime;
use burn_cubecl::CubeBackend;

/// The CPU backend.
pub type Flex = burn::backend::Flex;
/// Another CPU backend, with f32 and f64 only.
pub type NdArray = burn::backend::NdArray;
/// wgpu with kernel fusion, as Burn users get it.
pub type Fused = burn::backend::Wgpu;
/// wgpu without fusion.
pub type Eager = CubeBackend<WgpuRuntime, f32, i32, u32>;

/// Whether wgpu can run here. Without an adapter the test prints that it is skipped; CI must have
/// one.
pub fn has_wgpu() -> bool {
    let adapters = device_select::wgpu_adapters().expect("wgpu is compiled in");
    if adapters.is_empty() {
        test_data::skip(test_data::VULKAN);
    }
    !adapters.is_empty()
}

/// Runs a generic case on every runtime of the machine: `on_every_runtime!(case, argument)` calls
/// `case::<B>("name", argument)`.
#[macro_export]
macro_rules! on_every_runtime {
    ($case:ident $(, $argument:expr)*) => {
        $crate::on_cpu_and_wgpu!($case $(, $argument)*);
        $case::<$crate::support::runtime::NdArray>("ndarray" $(, $argument)*);
        if $crate::support::runtime::has_wgpu() {
            $case::<$crate::support::runtime::Eager>("wgpu" $(, $argument)*);
        }
    };
}

/// Runs a generic case on one CPU backend and on wgpu with fusion, whose kernels and host code the
/// other runtimes share.
#[macro_export]
macro_rules! on_cpu_and_wgpu {
    ($case:ident $(, $argument:expr)*) => {
        $case::<$crate::support::runtime::Flex>("flex" $(, $argument)*);
        if $crate::support::runtime::has_wgpu() {
            $case::<$crate::support::runtime::Fused>("wgpu fused" $(, $argument)*);
        }
    };
}
