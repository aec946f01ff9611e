//! Checks for CUDA programs that compile kernels at run time: driver, NVRTC and headers.
//!
//! Errors say how to install or locate a missing part. NVRTC and headers may be missing if CubeCL's
//! cache has compiled kernels; kernels that are not in it then fail.
//!
//! CubeCL reads the headers from `CUDA_PATH`, else from `/usr/local/cuda`, `/opt/cuda` or the
//! distribution's folder. It loads the libraries from the loader's path. Toolkits elsewhere and
//! Python wheels are searched only for the error message.

use std::path::PathBuf;

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Major version: 13 of 13.0.
    pub major: u32,
    /// Minor version: 0 of 13.0.
    pub minor: u32,
}

impl core::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Versions and devices of a usable CUDA installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaSetup {
    /// Number of devices.
    pub devices: usize,
    /// Newest CUDA version that the driver supports.
    pub driver: CudaVersion,
    /// Version of the runtime compiler. None if it is missing: only kernels in CubeCL's cache run.
    pub nvrtc: Option<CudaVersion>,
}

/// Reason why CUDA programs cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver library is missing.
    #[error("the driver library (libcuda) was not found: install NVIDIA's driver")]
    NoDriver,
    /// The driver sees no device.
    #[error("the driver reports no device: is there one, and does CUDA_VISIBLE_DEVICES hide it?")]
    NoDevice,
    /// The driver returned an error or lacks a symbol.
    #[error("the driver failed: {reason}")]
    Driver {
        /// Message of the driver.
        reason: String,
    },
    /// The runtime compiler is missing.
    #[error("the runtime compiler (libnvrtc) was not found; {}", libraries(found))]
    NoNvrtc {
        /// Folders that hold one outside the loader's path.
        found: Vec<PathBuf>,
    },
    /// The driver is older than NVRTC and cannot read its PTX.
    #[error(
        "the NVIDIA driver is of CUDA {driver}, but NVRTC of {nvrtc}, and a driver reads the PTX of its own version and older ones \
         only: install a driver of CUDA {nvrtc} or newer, or NVRTC {driver} (pip install \"nvidia-cuda-nvrtc=={driver}.*\"; before \
         CUDA 13 the package is nvidia-cuda-nvrtc-cu12)"
    )]
    DriverTooOld {
        /// Newest CUDA version that the driver supports.
        driver: CudaVersion,
        /// Version of NVRTC.
        nvrtc: CudaVersion,
    },
    /// NVRTC is older than the device.
    #[error("NVRTC of CUDA {nvrtc} does not know this device, sm_{sm}: install a newer one that the driver can read")]
    NvrtcTooOld {
        /// Version of NVRTC.
        nvrtc: CudaVersion,
        /// Ten times the compute capability of the first device.
        sm: i32,
    },
    /// CubeCL's search path has no folder of headers.
    #[error(
        "the CUDA headers were not found: CUDA_PATH is not set, and there is no /usr/local/cuda; {}",
        toolkits(found)
    )]
    NoHeaders {
        /// Folders that hold the headers.
        found: Vec<PathBuf>,
    },
    /// The folder that CubeCL uses lacks a header.
    #[error("the CUDA headers in {} lack {missing}; {}", toolkit.join("include").display(), toolkits(found))]
    HeaderMissing {
        /// Value of `CUDA_PATH`, or the default.
        toolkit: PathBuf,
        /// First header that is missing.
        missing: &'static str,
        /// Folders that hold all headers.
        found: Vec<PathBuf>,
    },
}

fn join(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn libraries(found: &[PathBuf]) -> String {
    match found {
        [] => "install the CUDA toolkit, or pip install nvidia-cuda-nvrtc (before CUDA 13: nvidia-cuda-nvrtc-cu12) and put its folder \
               lib into LD_LIBRARY_PATH"
            .into(),
        [folder, ..] => {
            format!("there is one in {}: export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:{}", join(found), folder.display())
        }
    }
}

fn toolkits(found: &[PathBuf]) -> String {
    match found {
        [] => "install the CUDA toolkit, or pip install nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt, and set CUDA_PATH to the \
               folder nvidia/cu13 that they make. (Wheels before CUDA 13 are nvidia-cuda-runtime-cu12, nvidia-cuda-cccl-cu12 and \
               nvidia-cuda-nvcc-cu12, whose folders include are to be put together into one: cp -rs)"
            .into(),
        [folder, ..] => format!("they are in {}: export CUDA_PATH={}", join(found), folder.display()),
    }
}

/// Headers that CubeCL's kernels include, in `include`. libcu++ of CUDA 13 is in `include/cccl`.
#[cfg(any(feature = "cuda", test))]
const HEADERS: [&str; 7] =
    ["cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "cooperative_groups.h", "cuda/barrier"];

/// First of the headers that a toolkit lacks.
#[cfg(any(feature = "cuda", test))]
fn missing_header(toolkit: &std::path::Path) -> Option<&'static str> {
    let include = toolkit.join("include");
    HEADERS.into_iter().find(|header| !include.join(header).is_file() && !include.join("cccl").join(header).is_file())
}

#[cfg(feature = "cuda")]
mod found {
    use std::path::Path;

    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    use super::*;
    use crate::DeviceError;

    /// Checks the driver, NVRTC and the headers that CubeCL compiles with, and counts the devices.
    ///
    /// # Errors
    ///
    /// A missing part, with its location if it is outside the search path; a driver older than
    /// NVRTC. NVRTC and headers may be missing if CubeCL's cache has kernels.
    pub fn cuda_setup() -> Result<CudaSetup, DeviceError> {
        Ok(setup()?)
    }

    /// Name of the first device according to the driver. Panics without a driver: call
    /// [`cuda_setup`] first.
    pub(crate) fn device_name() -> Option<String> {
        let device = cudarc::driver::result::device::get(0).ok()?;
        cudarc::driver::result::device::get_name(device).ok()
    }

    /// Memory of the first device in bytes. Panics without a driver: call [`cuda_setup`] first.
    pub(crate) fn device_memory() -> Option<u64> {
        let device = cudarc::driver::result::device::get(0).ok()?;
        // SAFETY: the driver has just returned the device.
        let bytes = unsafe { cudarc::driver::result::device::total_mem(device) };
        Some(bytes.ok()? as u64)
    }

    fn setup() -> Result<CudaSetup, CudaError> {
        // SAFETY: only tries to load a shared library.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // A library older than the bindings lacks symbols, and the loader panics on the first
        // missing one.
        let asked = std::panic::catch_unwind(|| {
            cudarc::driver::result::init()?;
            let mut version = 0;
            // SAFETY: writes an integer; only a null pointer makes it fail.
            unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) };
            Ok((cudarc::driver::result::device::get_count()?, version as u32))
        });
        let (devices, driver) = match asked {
            Ok(Ok((0, _))) => return Err(CudaError::NoDevice),
            Ok(Ok((devices, version))) => (devices as usize, version),
            Ok(Err::<_, cudarc::driver::DriverError>(e))
                if e.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE =>
            {
                return Err(CudaError::NoDevice);
            }
            Ok(Err(e)) => return Err(CudaError::Driver { reason: format!("{e:?}") }),
            Err(_) => {
                let reason = "it lacks a symbol that the bindings need; is it too old?".into();
                return Err(CudaError::Driver { reason });
            }
        };
        // 1000 · major + 10 · minor.
        let driver = CudaVersion { major: driver / 1000, minor: driver % 1000 / 10 };
        match compiler() {
            Err(_) if has_compiled_kernels() => Ok(CudaSetup { devices, driver, nvrtc: None }),
            nvrtc => CudaSetup { devices, driver, nvrtc: Some(nvrtc?) }.checked(),
        }
    }

    /// Whether CubeCL's cache has kernels. It looks there before it compiles.
    fn has_compiled_kernels() -> bool {
        let config = CubeClRuntimeConfig::get();
        let root = config.compilation.cache.as_ref().map(|cache| cache.root().join("cuda"));
        // A folder for each version of CubeCL.
        let versions = root.and_then(|root| root.read_dir().ok()).into_iter().flatten().flatten();
        let mut files = versions.map(|version| version.path().join("ptx/toc.json.log"));
        files.any(|file| file.metadata().is_ok_and(|file| file.len() > 0))
    }

    /// Version of NVRTC, if it, the headers and the first device go together.
    fn compiler() -> Result<CudaVersion, CudaError> {
        // SAFETY: only tries to load a shared library.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            let has_nvrtc = |folder: &Path| {
                let mut files = folder.read_dir().into_iter().flatten().flatten();
                files.any(|file| file.file_name().to_string_lossy().starts_with("libnvrtc.so"))
            };
            let folders = roots().into_iter().flat_map(|root| ["lib64", "lib"].map(|lib| root.join(lib)));
            return Err(CudaError::NoNvrtc { found: folders.filter(|folder| has_nvrtc(folder)).collect() });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes an integer to each pointer; only null pointers make it fail.
        unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
        let nvrtc = CudaVersion { major: major as u32, minor: minor as u32 };
        if let Some(sm) = first_architecture()
            && !known_architectures().contains(&sm)
        {
            return Err(CudaError::NvrtcTooOld { nvrtc, sm });
        }
        let whole = || roots().into_iter().filter(|root| missing_header(root).is_none()).collect();
        let toolkit = match cubecl::cuda::install::cuda_path() {
            Some(toolkit) => toolkit,
            None => return Err(CudaError::NoHeaders { found: whole() }),
        };
        if let Some(missing) = missing_header(&toolkit) {
            return Err(CudaError::HeaderMissing { toolkit, missing, found: whole() });
        }
        Ok(nvrtc)
    }

    /// Ten times the compute capability of the first device, such as 90.
    fn first_architecture() -> Option<i32> {
        use cudarc::driver::sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let device = cudarc::driver::result::device::get(0).ok()?;
        // SAFETY: the driver has just returned the device.
        let [major, minor] =
            [MAJOR, MINOR].map(|part| unsafe { cudarc::driver::result::device::get_attribute(device, part) });
        Some(10 * major.ok()? + minor.ok()?)
    }

    /// Architectures that NVRTC compiles for.
    fn known_architectures() -> Vec<i32> {
        let mut count = 0;
        // SAFETY: writes the length, then a list of that length.
        unsafe {
            cudarc::nvrtc::sys::nvrtcGetNumSupportedArchs(&mut count);
            let mut known = vec![0; count as usize];
            cudarc::nvrtc::sys::nvrtcGetSupportedArchs(known.as_mut_ptr());
            known
        }
    }

    /// Toolkits in `/usr/local` and `/opt`, newest first, then the folders of Python wheels.
    fn roots() -> Vec<PathBuf> {
        let named = |folder: &Path, begins: &str| {
            let entries = folder.read_dir().into_iter().flatten().flatten();
            let is_named = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(begins));
            let mut paths: Vec<_> = entries.map(|entry| entry.path()).filter(is_named).collect();
            paths.sort_unstable_by(|a, b| b.cmp(a));
            paths
        };
        let mut roots: Vec<PathBuf> =
            ["/usr/local", "/opt"].iter().flat_map(|at| named(Path::new(at), "cuda")).collect();
        let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
        let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
        let system = ["/usr/local", "/usr"].map(PathBuf::from);
        for python in prefixes.chain(home).chain(system).flat_map(|prefix| named(&prefix.join("lib"), "python3")) {
            for packages in ["site-packages", "dist-packages"] {
                // nvidia/cu13; for CUDA 12 nvidia/cuda_nvrtc, cuda_runtime, cuda_cccl.
                roots.extend(named(&python.join(packages).join("nvidia"), "cu"));
            }
        }
        roots
    }
}

#[cfg(feature = "cuda")]
pub use found::cuda_setup;
#[cfg(feature = "cuda")]
pub(crate) use found::{device_memory, device_name};

#[cfg(any(feature = "cuda", test))]
impl CudaSetup {
    /// Returns itself if the driver can read the PTX of this NVRTC.
    fn checked(self) -> Result<Self, CudaError> {
        match (self.driver, self.nvrtc) {
            (driver, Some(nvrtc)) if nvrtc > driver => Err(CudaError::DriverTooOld { driver, nvrtc }),
            _ => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_reads_the_ptx_of_its_own_version_and_older_ones() {
        let version = |major, minor| CudaVersion { major, minor };
        let setup = |driver, nvrtc| CudaSetup { devices: 1, driver, nvrtc: Some(nvrtc) };
        for (driver, nvrtc) in [((13, 0), (13, 0)), ((13, 5), (13, 0)), ((13, 0), (12, 9)), ((12, 10), (12, 9))] {
            let setup = setup(version(driver.0, driver.1), version(nvrtc.0, nvrtc.1));
            assert_eq!(setup.checked(), Ok(setup));
        }
        for (driver, nvrtc) in [((13, 0), (13, 1)), ((12, 9), (13, 0)), ((12, 8), (12, 9))] {
            let (driver, nvrtc) = (version(driver.0, driver.1), version(nvrtc.0, nvrtc.1));
            let error = setup(driver, nvrtc).checked().expect_err("too old");
            assert_eq!(error, CudaError::DriverTooOld { driver, nvrtc });
            let text = error.to_string();
            assert!(
                text.contains(&format!("driver of CUDA {nvrtc} or newer")) && text.contains(&format!("=={driver}.*"))
            );
        }
    }

    /// libcu++ is in `include` in CUDA 12 and in `include/cccl` in 13. An empty folder is not
    /// enough, nor is the folder of the runtime wheel without the others.
    #[test]
    fn headers_are_looked_for_one_by_one() {
        let root = std::env::temp_dir().join(format!("device-select-{}", std::process::id()));
        let put = |toolkit: &str, header: &str| {
            let path = root.join(toolkit).join("include").join(header);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            std::fs::write(path, "").expect("writable");
        };
        for header in HEADERS {
            put("12", header);
            put("13", &if header == "cuda/barrier" { format!("cccl/{header}") } else { header.into() });
            if header != "cuda/barrier" {
                put("runtime", header);
            }
        }
        let missing = ["12", "13", "runtime", "none"].map(|toolkit| missing_header(&root.join(toolkit)));
        std::fs::remove_dir_all(&root).expect("made above");
        assert_eq!(missing, [None, None, Some("cuda/barrier"), Some("cuda_runtime.h")]);
    }

    #[test]
    fn errors_say_what_to_type() {
        let found = vec![PathBuf::from("/venv/nvidia/cu13"), PathBuf::from("/usr/local/cuda-12.8")];
        let text = CudaError::NoHeaders { found: found.clone() }.to_string();
        assert!(text.ends_with("export CUDA_PATH=/venv/nvidia/cu13"), "{text}");
        let text = CudaError::NoNvrtc { found: vec!["/venv/nvidia/cu13/lib".into()] }.to_string();
        assert!(text.ends_with(":/venv/nvidia/cu13/lib"), "{text}");
        let empty = CudaError::HeaderMissing { toolkit: "/x".into(), missing: "mma.h", found: vec![] }.to_string();
        assert!(empty.contains("/x/include lack mma.h") && empty.contains("pip install"), "{empty}");
    }
}
