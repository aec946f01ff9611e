//! Which devices this machine has, found out without a panic: touching an absent one panics inside its driver's crate.
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Keeps Mesa's Vulkan driver from printing `error: XDG_RUNTIME_DIR is invalid or not set` for each adapter where there is no desktop
/// session: it looks for a Wayland display, and with any folder finds none.
///
/// # Safety
/// No other thread may run yet: the first thing that `main` does.
pub unsafe fn quiet_wayland() {
    const FOLDER: &str = "XDG_RUNTIME_DIR";
    if cfg!(target_os = "linux") && std::env::var_os(FOLDER).is_none() {
        // SAFETY: nobody else reads or writes the environment, as the caller has promised.
        unsafe { std::env::set_var(FOLDER, std::env::temp_dir()) };
    }
}

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
    /// The driver cannot read what the runtime compiler writes.
    #[error(
        "the NVIDIA driver is of CUDA {driver}, but NVRTC of {nvrtc}, and a driver reads the PTX of its own version and older ones \
         only: install a driver of CUDA {nvrtc} or newer, or NVRTC {driver} (pip install \"nvidia-cuda-nvrtc=={driver}.*\"; before \
         CUDA 13 the package is nvidia-cuda-nvrtc-cu12), or choose another device than cuda"
    )]
    DriverTooOld {
        /// The newest CUDA version that the driver knows.
        driver: CudaVersion,
        /// NVRTC's.
        nvrtc: CudaVersion,
    },
    /// wgpu has no adapter.
    #[error("wgpu found no adapter: install a Vulkan driver (a software one is Debian's mesa-vulkan-drivers)")]
    NoAdapter,
}

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

impl core::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What CUDA programs run with here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaSetup {
    /// How many devices there are.
    pub devices: usize,
    /// The newest CUDA version that the driver knows.
    pub driver: CudaVersion,
    /// Of the runtime compiler.
    pub nvrtc: CudaVersion,
}

/// The device to use.
///
/// # Errors
///
/// A forced device that is absent or not compiled in; `Auto` where nothing at all is compiled in, and where there is a GPU whose
/// driver is [too old](DeviceError::DriverTooOld).
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
                Err(error) if !matches!(error, DeviceError::DriverTooOld { .. }) => {}
                usable_or_old => return usable_or_old,
            }
            match select(DeviceChoice::Wgpu) {
                Ok(wgpu @ SelectedDevice::Wgpu(AdapterInfo { hardware: true, .. })) => Ok(wgpu),
                _ => select(DeviceChoice::Cpu),
            }
        }
    }
}

/// The CUDA devices, with the driver, NVRTC and the headers that CubeCL compiles with in place.
///
/// # Errors
///
/// What is missing; a driver older than NVRTC.
#[cfg(feature = "cuda")]
pub fn cuda_setup() -> Result<CudaSetup, DeviceError> {
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
    // A library older than the bindings lacks symbols, and the loader panics on the first of them.
    let found = std::panic::catch_unwind(|| {
        cudarc::driver::result::init()?;
        Ok((cudarc::driver::result::device::get_count()?, versions()))
    });
    let (devices, (driver, nvrtc)) = match found {
        Ok(Ok((0, _))) => return Err(missing("the driver reports no device".into())),
        Ok(Ok((devices, versions))) => (devices as usize, versions),
        Ok(Err::<_, cudarc::driver::DriverError>(e)) => return Err(missing(format!("the driver failed: {e:?}"))),
        Err(_) => return Err(missing("the driver lacks a symbol that the bindings need; is it too old?".into())),
    };
    CudaSetup { devices, driver, nvrtc }.checked()
}

/// The driver's version of CUDA, and NVRTC's.
#[cfg(feature = "cuda")]
fn versions() -> (CudaVersion, CudaVersion) {
    let (mut driver, mut major, mut minor) = (0, 0, 0);
    // SAFETY: both write an integer to each pointer. They fail for null pointers only.
    unsafe {
        cudarc::driver::sys::cuDriverGetVersion(&mut driver);
        cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
    }
    // 1000 · major + 10 · minor.
    let driver = CudaVersion { major: (driver / 1000) as u32, minor: (driver % 1000 / 10) as u32 };
    (driver, CudaVersion { major: major as u32, minor: minor as u32 })
}

#[cfg(any(feature = "cuda", test))]
impl CudaSetup {
    /// Itself, if the driver can read what NVRTC writes.
    fn checked(self) -> Result<Self, DeviceError> {
        let Self { driver, nvrtc, .. } = self;
        if nvrtc > driver { Err(DeviceError::DriverTooOld { driver, nvrtc }) } else { Ok(self) }
    }
}

/// The CUDA devices.
///
/// # Errors
///
/// Always: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn cuda_setup() -> Result<CudaSetup, DeviceError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_reads_the_ptx_of_its_own_version_and_older_ones() {
        let version = |major, minor| CudaVersion { major, minor };
        let setup = |driver, nvrtc| CudaSetup { devices: 1, driver, nvrtc };
        for (driver, nvrtc) in [((13, 0), (13, 0)), ((13, 5), (13, 0)), ((13, 0), (12, 9)), ((12, 10), (12, 9))] {
            let setup = setup(version(driver.0, driver.1), version(nvrtc.0, nvrtc.1));
            assert_eq!(setup.checked(), Ok(setup));
        }
        for (driver, nvrtc) in [((13, 0), (13, 1)), ((12, 9), (13, 0)), ((12, 8), (12, 9))] {
            let (driver, nvrtc) = (version(driver.0, driver.1), version(nvrtc.0, nvrtc.1));
            let error = setup(driver, nvrtc).checked().expect_err("too old");
            assert_eq!(error, DeviceError::DriverTooOld { driver, nvrtc });
            let text = error.to_string();
            assert!(
                text.contains(&format!("driver of CUDA {nvrtc} or newer")) && text.contains(&format!("=={driver}.*"))
            );
        }
    }
}
