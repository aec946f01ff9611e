//! Detection of this machine's devices without panics: touching an absent one panics inside its
//! driver's crate.
mod cuda;

use std::str::FromStr;

#[cfg(feature = "cuda")]
pub use cuda::cuda_setup;
pub use cuda::{CudaError, CudaSetup, CudaVersion};
use serde::{Deserialize, Serialize};

/// Silences `error: XDG_RUNTIME_DIR is invalid or not set`, which Mesa's Vulkan driver prints for
/// each adapter without a desktop session.
///
/// The driver looks for a Wayland display there. With any folder it finds none and stays quiet.
///
/// # Safety
/// No other thread may run yet: call this first in `main`.
pub unsafe fn quiet_wayland() {
    const FOLDER: &str = "XDG_RUNTIME_DIR";
    if cfg!(target_os = "linux") && std::env::var_os(FOLDER).is_none() {
        // SAFETY: no other thread accesses the environment, as the caller guarantees.
        unsafe { std::env::set_var(FOLDER, std::env::temp_dir()) };
    }
}

/// Device that a user requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum DeviceChoice {
    /// CUDA if there is a driver with a device, else a hardware wgpu adapter, else the CPU.
    #[default]
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// Any wgpu adapter, software ones included.
    Wgpu,
    /// The CPU backend `Flex`.
    Cpu,
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(s: &str) -> Result<Self, DeviceError> {
        match s {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda),
            "wgpu" => Ok(Self::Wgpu),
            "cpu" => Ok(Self::Cpu),
            _ => Err(DeviceError::Unknown { name: s.into() }),
        }
    }
}

/// Device that is present and supported by this build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectedDevice {
    /// The first CUDA device.
    Cuda,
    /// The default wgpu device.
    Wgpu(AdapterInfo),
    /// The CPU.
    Cpu,
}

impl SelectedDevice {
    /// Name of the GPU from its driver, such as `NVIDIA H100 80GB HBM3`; for CUDA, of the first
    /// device.
    pub fn hardware_name(&self) -> Option<String> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::device_name(),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => None,
            Self::Wgpu(AdapterInfo { name, hardware }) => hardware.then(|| name.clone()),
            Self::Cpu => None,
        }
    }

    /// Total memory of the first CUDA device in bytes. None for other devices.
    pub fn memory(&self) -> Option<u64> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda_setup().ok().and_then(|_| cuda::device_memory()),
            _ => None,
        }
    }
}

impl core::fmt::Display for SelectedDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Cuda => f.write_str("cuda"),
            Self::Wgpu(AdapterInfo { name, hardware: true }) => write!(f, "wgpu ({name})"),
            Self::Wgpu(AdapterInfo { name, hardware: false }) => write!(f, "wgpu (software: {name})"),
            Self::Cpu => f.write_str("cpu"),
        }
    }
}

/// A wgpu adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AdapterInfo {
    /// Name from the driver.
    pub name: String,
    /// Whether it is a GPU, not a software renderer.
    pub hardware: bool,
}

/// Reason why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No choice has this name.
    #[error("unknown device {name:?}: expected auto, cuda, wgpu or cpu")]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The backend is not compiled into this build.
    #[error("device {device} is not in this build: enable the feature {feature:?}")]
    NotCompiled {
        /// The requested device.
        device: &'static str,
        /// The cargo feature that enables it.
        feature: &'static str,
    },
    /// CUDA is not usable.
    #[error("CUDA is not usable: {0}; or choose another device than cuda")]
    Cuda(#[from] CudaError),
    /// wgpu has no adapter.
    #[error("wgpu found no adapter: install a Vulkan driver (a software one is Debian's mesa-vulkan-drivers)")]
    NoAdapter,
}

/// Selects the device to use.
///
/// # Errors
///
/// A requested device that is absent or not compiled in. `Auto` fails if no backend is compiled in,
/// or if a GPU and its driver are present but CUDA is [not usable](DeviceError::Cuda).
pub fn select(choice: DeviceChoice) -> Result<SelectedDevice, DeviceError> {
    match choice {
        DeviceChoice::Cuda => cuda_setup().map(|_| SelectedDevice::Cuda),
        DeviceChoice::Wgpu => {
            let adapters = wgpu_adapters()?;
            let best = adapters.iter().find(|a| a.hardware).or(adapters.first());
            best.cloned().map(SelectedDevice::Wgpu).ok_or(DeviceError::NoAdapter)
        }
        DeviceChoice::Cpu if cfg!(feature = "flex") => Ok(SelectedDevice::Cpu),
        DeviceChoice::Cpu => Err(DeviceError::NotCompiled { device: "cpu", feature: "flex" }),
        DeviceChoice::Auto => {
            match select(DeviceChoice::Cuda) {
                Err(DeviceError::NotCompiled { .. } | DeviceError::Cuda(CudaError::NoDriver | CudaError::NoDevice)) => {
                }
                usable_or_not => return usable_or_not,
            }
            match select(DeviceChoice::Wgpu) {
                Ok(wgpu @ SelectedDevice::Wgpu(AdapterInfo { hardware: true, .. })) => Ok(wgpu),
                _ => select(DeviceChoice::Cpu),
            }
        }
    }
}

/// Checks for CUDA.
///
/// # Errors
///
/// Always: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn cuda_setup() -> Result<CudaSetup, DeviceError> {
    Err(DeviceError::NotCompiled { device: "cuda", feature: "cuda" })
}

/// Adapters of the graphics API that Burn's `Wgpu` uses on this platform.
///
/// # Errors
///
/// wgpu is not in this build.
#[cfg(feature = "wgpu")]
pub fn wgpu_adapters() -> Result<Vec<AdapterInfo>, DeviceError> {
    use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi};
    let backends = AutoGraphicsApi::backend().into();
    let descriptor = wgpu::InstanceDescriptor { backends, ..wgpu::InstanceDescriptor::new_without_display_handle() };
    let instance = wgpu::Instance::new(descriptor);
    let adapters = burn_std::future::block_on(instance.enumerate_adapters(backends));
    let info = |adapter: wgpu::Adapter| {
        let info = adapter.get_info();
        AdapterInfo { name: info.name, hardware: info.device_type != wgpu::DeviceType::Cpu }
    };
    Ok(adapters.into_iter().map(info).collect())
}

/// Adapters of the graphics API that Burn's `Wgpu` uses on this platform.
///
/// # Errors
///
/// Always: this build has no wgpu.
#[cfg(not(feature = "wgpu"))]
pub fn wgpu_adapters() -> Result<Vec<AdapterInfo>, DeviceError> {
    Err(DeviceError::NotCompiled { device: "wgpu", feature: "wgpu" })
}
