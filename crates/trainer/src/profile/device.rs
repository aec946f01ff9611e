//! [`KernelLog`]: times of GPU kernels, read from CubeCL's log.
//!
//! CubeCL's profile level is fixed for the process when the first client is created, and a thread
//! writes the log with a delay. So a window is delimited by two
//! synchronized launches of a marker kernel.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use cubecl::config::profiling::ProfilingLogLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use tempfile::NamedTempFile;

use super::ProfileRow;
use super::cannot_profile;
use super::kernels::launch;

/// Name of [`profile_mark`] in the log.
const MARK: &str = "ProfileMark";
/// Maximum delay of the log after the device has finished.
const PATIENCE: Duration = Duration::from_secs(60);

#[cube(launch)]
fn profile_mark(out: &mut Array<u32>) {
    out[ABSOLUTE_POS] = 0;
}

/// CubeCL's kernel log. There is one per process, read by one profiler after another.
#[derive(Debug)]
pub(super) struct KernelLog {
    file: File,
    /// Bytes read from the file.
    read: Vec<u8>,
    /// Begin of the window in them.
    begin: usize,
    timing: &'static str,
}

impl KernelLog {
    /// Starts CubeCL's log and checks that it works.
    pub(super) fn open(device: &(impl Any + Debug)) -> anyhow::Result<Self> {
        let (path, file) = configure()?;
        let mut log = Self { file, read: vec![], begin: 0, timing: "" };
        log.discard()?;
        log.timing = mark(device)?;
        log.wait(0)?;
        // CubeCL keeps the file open, so it disappears when the process ends. For the process's
        // second profiler it is already removed.
        let _ = fs::remove_file(path);
        Ok(log)
    }

    /// Begins the window. The device must have finished all earlier work.
    pub(super) fn begin(&mut self, device: &(impl Any + Debug)) -> anyhow::Result<()> {
        self.discard()?;
        mark(device)?;
        self.begin = self.wait(0)?.end;
        Ok(())
    }

    /// Kernels since [`begin`](Self::begin). The device must have finished.
    pub(super) fn end(&mut self, device: &(impl Any + Debug)) -> anyhow::Result<(&'static str, Vec<ProfileRow>)> {
        mark(device)?;
        let end = self.wait(self.begin)?.start;
        let mut rows = HashMap::<String, ProfileRow>::new();
        for (kernel, seconds) in String::from_utf8_lossy(&self.read[self.begin..end]).lines().filter_map(launch) {
            let row = rows.entry(kernel.into()).or_insert_with(|| ProfileRow::new(kernel.into(), 0, 0.0));
            row.calls += 1;
            row.seconds += seconds;
        }
        self.discard()?;
        Ok((self.timing, rows.into_values().collect()))
    }

    /// Empties the log, which has lines of all steps of a run. CubeCL appends at the current end of
    /// the file.
    pub(super) fn discard(&mut self) -> anyhow::Result<()> {
        (self.read, self.begin) = (vec![], 0);
        self.file.set_len(0).and_then(|()| self.file.rewind()).with_context(no_log)
    }

    /// Reads until there is a mark after the first `from` bytes, and returns the range of its line.
    fn wait(&mut self, from: usize) -> anyhow::Result<std::ops::Range<usize>> {
        let since = Instant::now();
        let mut start = from;
        loop {
            self.file.read_to_end(&mut self.read).with_context(no_log)?;
            while let Some(length) = self.read[start..].iter().position(|byte| *byte == b'\n') {
                let line = start..start + length + 1;
                let text = String::from_utf8_lossy(&self.read[line.clone()]);
                if launch(text.trim_end()).is_some_and(|(kernel, _)| kernel == MARK) {
                    return Ok(line);
                }
                start = line.end;
            }
            if since.elapsed() > PATIENCE {
                bail!(
                    "training.profile_steps: CubeCL has not logged the kernels that were launched within {} s",
                    PATIENCE.as_secs()
                );
            }
            sleep(Duration::from_millis(2));
        }
    }
}

fn no_log() -> String {
    format!("training.profile_steps: cannot keep a log of kernels in {}", std::env::temp_dir().display())
}

/// Configures the log of this process's CubeCL, once.
fn configure() -> anyhow::Result<(PathBuf, File)> {
    static LOG: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.is_none() {
        let file = NamedTempFile::with_prefix("burn-float8-kernels-").with_context(no_log)?;
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        let logger = &mut config.profiling.logger;
        (logger.level, logger.file, logger.append) = (ProfilingLogLevel::Basic, Some(file.path().into()), true);
        let mut current = CubeClRuntimeConfig::storage().lock();
        if current.is_some() {
            bail!(
                "training.profile_steps: this process has used a GPU before, so that CubeCL does not time its kernels: profile in a process of its own"
            );
        }
        let (file, path) = file.keep().with_context(no_log)?;
        *current = Some(Arc::new(config));
        *log = Some((path, file));
    }
    let (path, file) = log.as_ref().expect("made above");
    Ok((path.clone(), file.try_clone().with_context(no_log)?))
}

/// Launches [`profile_mark`] and waits for it. Returns how the device's kernels are timed.
fn mark(device: &(impl Any + Debug)) -> anyhow::Result<&'static str> {
    let any: &dyn Any = device;
    #[cfg(feature = "wgpu")]
    if let Some(device) = any.downcast_ref() {
        return mark_on::<cubecl::wgpu::WgpuRuntime>(device);
    }
    #[cfg(feature = "cuda")]
    if let Some(device) = any.downcast_ref() {
        return mark_on::<cubecl::cuda::CudaRuntime>(device);
    }
    Err(cannot_profile(device))
}

fn mark_on<R: Runtime>(device: &R::Device) -> anyhow::Result<&'static str> {
    let client = R::client(device);
    let out = client.empty(4);
    // SAFETY: the kernel writes one word.
    let out = unsafe { ArrayArg::from_raw_parts(out, 1) };
    profile_mark::launch::<R>(&client, CubeCount::new_single(), CubeDim::new_single(), out);
    let done = cubecl::future::block_on(client.sync());
    done.map_err(|error| anyhow!("training.profile_steps: the device failed: {error:?}"))?;
    Ok(match client.properties().timing_method {
        TimingMethod::Device => "between a kernel's timestamps on the device",
        TimingMethod::System => "on the host, from a kernel's launch until the device has finished it",
    })
}
