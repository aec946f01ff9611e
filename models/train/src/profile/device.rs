//! [`KernelLog`]: how long kernels on a GPU take, from the log that CubeCL writes of them.
//!
//! CubeCL's profile level holds for the process from the first client on, and its log is written by a thread that lags behind. So a
//! window is what the log has between two launches of a kernel of this file, each of which is waited for.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cubecl::config::profiling::ProfilingLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use tempfile::NamedTempFile;

use super::kernels::known;
use super::log::{Launch, launch};
use super::{ProfileError, Spent, Timing};

/// How the log names [`profile_mark`].
const MARK: &str = "ProfileMark";
/// How long the log may lag behind a device that has finished.
const PATIENCE: Duration = Duration::from_secs(60);

#[cube(launch)]
fn profile_mark(out: &mut Array<u32>) {
    out[ABSOLUTE_POS] = 0;
}

/// CubeCL's log of kernels. There is one in a process, which its profilers read one after another.
#[derive(Debug)]
pub(super) struct KernelLog {
    file: File,
    /// What has been read of the file.
    read: Vec<u8>,
    /// Where the window begins in it.
    begin: usize,
    timing: Timing,
}

impl KernelLog {
    /// Has CubeCL write one, and sees that it does.
    pub(super) fn open(device: &(impl Any + Debug)) -> Result<Self, ProfileError> {
        let (path, file) = configure()?;
        let mut log = Self { file, read: vec![], begin: 0, timing: Timing::Synchronized };
        log.discard()?;
        log.timing = mark(device)?;
        log.wait(0)?;
        // CubeCL has it open; nothing is left of it once the process ends. The process's second profiler finds it gone.
        let _ = fs::remove_file(path);
        Ok(log)
    }

    /// Begins the window on a device that has finished all that came before.
    pub(super) fn begin(&mut self, device: &(impl Any + Debug)) -> Result<(), ProfileError> {
        self.discard()?;
        mark(device)?;
        self.begin = self.wait(0)?.end;
        Ok(())
    }

    /// What the device has done since [`begin`](Self::begin), once it has finished.
    pub(super) fn end(&mut self, device: &(impl Any + Debug)) -> Result<(Timing, Vec<Spent>), ProfileError> {
        mark(device)?;
        let end = self.wait(self.begin)?.start;
        let mut spent = HashMap::<String, Spent>::new();
        for line in String::from_utf8_lossy(&self.read[self.begin..end]).lines() {
            let Some(Launch { kernel, time }) = launch(line) else { continue };
            let (name, kind) = known(kernel);
            let row =
                spent.entry(name.into()).or_insert_with(|| Spent { name: name.into(), kind, calls: 0, seconds: 0.0 });
            row.calls += 1;
            row.seconds += time.as_secs_f64();
        }
        self.discard()?;
        Ok((self.timing, spent.into_values().collect()))
    }

    /// Empties the log: its lines are those of all steps of a run. CubeCL appends to it, wherever its end is.
    pub(super) fn discard(&mut self) -> Result<(), ProfileError> {
        (self.read, self.begin) = (vec![], 0);
        self.file.set_len(0)?;
        Ok(self.file.rewind()?)
    }

    /// Reads on until there is a mark after the first `from` bytes, and gives the place of its line.
    fn wait(&mut self, from: usize) -> Result<std::ops::Range<usize>, ProfileError> {
        let since = Instant::now();
        let mut start = from;
        loop {
            self.file.read_to_end(&mut self.read)?;
            while let Some(length) = self.read[start..].iter().position(|byte| *byte == b'\n') {
                let line = start..start + length + 1;
                let text = String::from_utf8_lossy(&self.read[line.clone()]);
                if launch(text.trim_end()).is_some_and(|launch| launch.kernel == MARK) {
                    return Ok(line);
                }
                start = line.end;
            }
            if since.elapsed() > PATIENCE {
                return Err(ProfileError::Missing { waited: PATIENCE });
            }
            sleep(Duration::from_millis(2));
        }
    }
}

/// Where this process's CubeCL logs kernels, which is decided once.
fn configure() -> Result<(PathBuf, File), ProfileError> {
    static LOG: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.is_none() {
        let (file, path) = NamedTempFile::with_prefix("burn-float8-kernels-")?.keep().map_err(|error| error.error)?;
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        let logger = &mut config.profiling.logger;
        (logger.level, logger.file, logger.append) = (ProfilingLogLevel::Basic, Some(path.clone()), true);
        let mut current = CubeClRuntimeConfig::storage().lock();
        if current.is_some() {
            fs::remove_file(path)?;
            return Err(ProfileError::TooLate);
        }
        *current = Some(Arc::new(config));
        *log = Some((path, file));
    }
    let (path, file) = log.as_ref().expect("made above");
    Ok((path.clone(), file.try_clone()?))
}

/// Launches [`profile_mark`] and waits for it. How the device's kernels are timed.
fn mark(device: &(impl Any + Debug)) -> Result<Timing, ProfileError> {
    let any: &dyn Any = device;
    #[cfg(feature = "wgpu")]
    if let Some(device) = any.downcast_ref() {
        return mark_on::<cubecl::wgpu::WgpuRuntime>(device);
    }
    #[cfg(feature = "cuda")]
    if let Some(device) = any.downcast_ref() {
        return mark_on::<cubecl::cuda::CudaRuntime>(device);
    }
    Err(ProfileError::NotCompiled { device: format!("{device:?}") })
}

fn mark_on<R: Runtime>(device: &R::Device) -> Result<Timing, ProfileError> {
    let client = R::client(device);
    let out = client.empty(4);
    // SAFETY: the kernel writes one word.
    let out = unsafe { ArrayArg::from_raw_parts(out, 1) };
    profile_mark::launch::<R>(&client, CubeCount::new_single(), CubeDim::new_single(), out);
    let done = cubecl::future::block_on(client.sync());
    done.map_err(|error| ProfileError::Device { reason: format!("{error:?}") })?;
    Ok(match client.properties().timing_method {
        TimingMethod::Device => Timing::Timestamps,
        TimingMethod::System => Timing::Synchronized,
    })
}
