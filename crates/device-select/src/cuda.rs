//! What CUDA programs need that compile their kernels where they run: driver, NVRTC and headers, and what to do where one is missing.
//!
//! CubeCL takes the headers from `CUDA_PATH`, else from `/usr/local/cuda`, `/opt/cuda` or the distribution's, and the libraries from
//! where the loader finds them. Toolkits elsewhere, and the wheels of Python, are looked for only to say where they are.

use std::path::PathBuf;

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
    /// The version of the runtime compiler.
    pub nvrtc: CudaVersion,
}

/// Why CUDA programs cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error("the driver library (libcuda) was not found: install NVIDIA's driver")]
    NoDriver,
    /// The driver sees no device.
    #[error("the driver reports no device: is there one, and does CUDA_VISIBLE_DEVICES hide it?")]
    NoDevice,
    /// The driver gave an error, or lacks something.
    #[error("the driver failed: {reason}")]
    Driver {
        /// What it says.
        reason: String,
    },
    /// There is no runtime compiler.
    #[error("the runtime compiler (libnvrtc) was not found; {}", libraries(found))]
    NoNvrtc {
        /// Folders that hold one, where the loader does not look.
        found: Vec<PathBuf>,
    },
    /// The driver cannot read what the runtime compiler writes.
    #[error(
        "the NVIDIA driver is of CUDA {driver}, but NVRTC of {nvrtc}, and a driver reads the PTX of its own version and older ones \
         only: install a driver of CUDA {nvrtc} or newer, or NVRTC {driver} (pip install \"nvidia-cuda-nvrtc=={driver}.*\"; before \
         CUDA 13 the package is nvidia-cuda-nvrtc-cu12)"
    )]
    DriverTooOld {
        /// The newest CUDA version that the driver knows.
        driver: CudaVersion,
        /// NVRTC's.
        nvrtc: CudaVersion,
    },
    /// There is no folder of headers where CubeCL looks.
    #[error(
        "the CUDA headers were not found: CUDA_PATH is not set, and there is no /usr/local/cuda; {}",
        toolkits(found)
    )]
    NoHeaders {
        /// Folders that have them.
        found: Vec<PathBuf>,
    },
    /// The folder that CubeCL takes lacks a header.
    #[error("the CUDA headers in {} lack {missing}; {}", toolkit.join("include").display(), toolkits(found))]
    HeaderMissing {
        /// What `CUDA_PATH` says, or the default.
        toolkit: PathBuf,
        /// The first header that it lacks.
        missing: &'static str,
        /// Folders that have all of them.
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

/// A header that CubeCL's kernels include, in `include` or, of libcu++ of CUDA 13, in `include/cccl`.
#[cfg(any(feature = "cuda", test))]
const HEADERS: [&str; 7] =
    ["cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "cooperative_groups.h", "cuda/barrier"];

/// The first of the headers that a toolkit lacks.
#[cfg(any(feature = "cuda", test))]
fn missing_header(toolkit: &std::path::Path) -> Option<&'static str> {
    let include = toolkit.join("include");
    HEADERS.into_iter().find(|header| !include.join(header).is_file() && !include.join("cccl").join(header).is_file())
}

#[cfg(feature = "cuda")]
mod found {
    use std::path::Path;

    use super::*;
    use crate::DeviceError;

    /// The CUDA devices, with the driver, NVRTC and the headers that CubeCL compiles with in place.
    ///
    /// # Errors
    ///
    /// What is missing, and where it is if not where it is looked for; a driver older than NVRTC.
    pub fn cuda_setup() -> Result<CudaSetup, DeviceError> {
        Ok(setup()?)
    }

    /// The driver's name for the first device. Only where [`cuda_setup`] has found one: without a driver it panics.
    pub(crate) fn device_name() -> Option<String> {
        let device = cudarc::driver::result::device::get(0).ok()?;
        cudarc::driver::result::device::get_name(device).ok()
    }

    /// Bytes of the first device's memory. Only where [`cuda_setup`] has found one: without a driver it panics.
    pub(crate) fn device_memory() -> Option<u64> {
        let device = cudarc::driver::result::device::get(0).ok()?;
        // SAFETY: the driver has just given the device.
        let bytes = unsafe { cudarc::driver::result::device::total_mem(device) };
        Some(bytes.ok()? as u64)
    }

    fn setup() -> Result<CudaSetup, CudaError> {
        // SAFETY: it only tries to load a shared library.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // A library older than the bindings lacks symbols, and the loader panics on the first of them.
        let asked = std::panic::catch_unwind(|| {
            cudarc::driver::result::init()?;
            let mut version = 0;
            // SAFETY: it writes an integer, and fails for a null pointer only.
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
        // SAFETY: it only tries to load a shared library.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            let has_nvrtc = |folder: &Path| {
                let mut files = folder.read_dir().into_iter().flatten().flatten();
                files.any(|file| file.file_name().to_string_lossy().starts_with("libnvrtc.so"))
            };
            let folders = roots().into_iter().flat_map(|root| ["lib64", "lib"].map(|lib| root.join(lib)));
            return Err(CudaError::NoNvrtc { found: folders.filter(|folder| has_nvrtc(folder)).collect() });
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes an integer to each pointer, and fails for null pointers only.
        unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
        let nvrtc = CudaVersion { major: major as u32, minor: minor as u32 };
        let whole = || roots().into_iter().filter(|root| missing_header(root).is_none()).collect();
        let toolkit = match cubecl::cuda::install::cuda_path() {
            Some(toolkit) => toolkit,
            None => return Err(CudaError::NoHeaders { found: whole() }),
        };
        if let Some(missing) = missing_header(&toolkit) {
            return Err(CudaError::HeaderMissing { toolkit, missing, found: whole() });
        }
        CudaSetup { devices, driver, nvrtc }.checked()
    }

    /// Toolkits in `/usr/local` and `/opt`, the newest first, and the folders of Python's wheels.
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
                // nvidia/cu13, or of CUDA 12 nvidia/cuda_nvrtc, cuda_runtime, cuda_cccl.
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
    /// Itself, if the driver can read what NVRTC writes.
    fn checked(self) -> Result<Self, CudaError> {
        let Self { driver, nvrtc, .. } = self;
        if nvrtc > driver { Err(CudaError::DriverTooOld { driver, nvrtc }) } else { Ok(self) }
    }
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
            assert_eq!(error, CudaError::DriverTooOld { driver, nvrtc });
            let text = error.to_string();
            assert!(
                text.contains(&format!("driver of CUDA {nvrtc} or newer")) && text.contains(&format!("=={driver}.*"))
            );
        }
    }

    /// libcu++ lies in `include` in CUDA 12, in `include/cccl` in 13; an empty folder, or the one of the runtime's wheel alone, will
    /// not do.
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
