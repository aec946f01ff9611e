//! Which devices this machine has, found out without a panic: touching an absent one panics inside its driver's crate.
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// CUDA if it is usable, else a hardware wgpu adapter, else the CPU.
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

/// A device that is present and that this build can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectedDevice {
    /// The first CUDA device.
    Cuda,
    /// The default wgpu device.
    Wgpu(AdapterInfo),
    /// The CPU.
    Cpu,
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
    /// The driver's name for it.
    pub name: String,
    /// Whether it is a GPU rather than a CPU pretending to be one.
    pub hardware: bool,
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No such choice.
    #[error("unknown device {name:?}: expected auto, cuda, wgpu or cpu")]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The backend was left out of this build.
    #[error("device {device} is not in this build: enable the feature {feature:?}")]
    NotCompiled {
        /// What was asked for.
        device: &'static str,
        /// The cargo feature that brings it.
        feature: &'static str,
    },
    /// CUDA is not usable.
    #[error("CUDA is not usable: {reason}")]
    Cuda {
        /// What is missing.
        reason: String,
    },
    /// wgpu has no adapter.
    #[error("wgpu found no adapter: install a Vulkan driver (a software one is Debian's mesa-vulkan-drivers)")]
    NoAdapter,
}

/// The device to use.
///
/// # Errors
///
/// A forced device that is absent or not compiled in; `Auto` where nothing at all is compiled in.
pub fn select(choice: DeviceChoice) -> Result<SelectedDevice, DeviceError> {
    match choice {
        DeviceChoice::Cuda => cuda_usable().map(|_| SelectedDevice::Cuda),
        DeviceChoice::Wgpu => {
            let adapters = wgpu_adapters()?;
            let best = adapters.iter().find(|a| a.hardware).or(adapters.first());
            best.cloned().map(SelectedDevice::Wgpu).ok_or(DeviceError::NoAdapter)
        }
        DeviceChoice::Cpu if cfg!(feature = "flex") => Ok(SelectedDevice::Cpu),
        DeviceChoice::Cpu => Err(DeviceError::NotCompiled { device: "cpu", feature: "flex" }),
        DeviceChoice::Auto => {
            if let Ok(cuda) = select(DeviceChoice::Cuda) {
                return Ok(cuda);
            }
            match select(DeviceChoice::Wgpu) {
                Ok(wgpu @ SelectedDevice::Wgpu(AdapterInfo { hardware: true, .. })) => Ok(wgpu),
                _ => select(DeviceChoice::Cpu),
            }
        }
    }
}

/// How many CUDA devices there are, with the driver, NVRTC and the headers that CubeCL compiles with in place.
///
/// # Errors
///
/// What is missing.
#[cfg(feature = "cuda")]
pub fn cuda_usable() -> Result<usize, DeviceError> {
    let missing = |reason: String| DeviceError::Cuda { reason };
    // SAFETY: both only try to load a shared library.
    let (driver, nvrtc) = unsafe { (cudarc::driver::sys::is_culib_present(), cudarc::nvrtc::sys::is_culib_present()) };
    if !driver {
        return Err(missing("the driver library (libcuda) was not found".into()));
    }
    if !nvrtc {
        return Err(missing("the runtime compiler (libnvrtc) was not found".into()));
    }
    if cubecl::cuda::install::cuda_path().is_none() {
        return Err(missing("the CUDA headers were not found: set CUDA_PATH to the toolkit".into()));
    }
    // A driver older than the bindings lacks symbols, and the loader panics on the first of them.
    let count = std::panic::catch_unwind(|| {
        cudarc::driver::result::init()?;
        cudarc::driver::result::device::get_count()
    });
    match count {
        Ok(Ok(0)) => Err(missing("the driver reports no device".into())),
        Ok(Ok(n)) => Ok(n as usize),
        Ok(Err(e)) => Err(missing(format!("the driver failed: {e:?}"))),
        Err(_) => Err(missing("the driver lacks a symbol that the bindings need; is it too old?".into())),
    }
}

/// How many CUDA devices there are.
///
/// # Errors
///
/// Always: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn cuda_usable() -> Result<usize, DeviceError> {
    Err(DeviceError::NotCompiled { device: "cuda", feature: "cuda" })
}

/// The adapters of the graphics API that Burn's `Wgpu` uses on this platform.
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

/// The adapters of the graphics API that Burn's `Wgpu` uses on this platform.
///
/// # Errors
///
/// Always: this build has no wgpu.
#[cfg(not(feature = "wgpu"))]
pub fn wgpu_adapters() -> Result<Vec<AdapterInfo>, DeviceError> {
    Err(DeviceError::NotCompiled { device: "wgpu", feature: "wgpu" })
}
