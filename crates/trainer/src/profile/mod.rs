//! [`Profiler`]: breaks down the time of some steps by kernel or operation.
//!
//! On a GPU, CubeCL times each kernel. This is decided when a device is first used, so it covers
//! all steps of the run. It waits for each kernel, so all steps are slower. On the CPU,
//! [`burn_float8::profile`] times Burn's operations, only within the window.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod device;
#[cfg(any(feature = "wgpu", feature = "cuda", test))]
mod kernels;
mod table;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow};
use burn::tensor::backend::Backend;
use burn_float8::profile::{Entry, start, stop};
use device_select::SelectedDevice;
pub use table::{ProfileRow, ProfileTable, RowKind};

use crate::atomic;
use crate::error::device_failed;

/// Name of the table's file in a run's folder.
pub const PROFILE_FILE: &str = "profile.json";

/// Source of the times.
#[derive(Debug)]
enum TimeSource {
    Host,
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    Device(device::KernelLog),
}

/// Profiles the steps of a window.
#[derive(Debug)]
pub struct Profiler {
    steps: [usize; 2],
    file: Option<PathBuf>,
    device: String,
    source: TimeSource,
    /// First step and start time of an open window.
    window: Option<(usize, Instant)>,
}

impl Profiler {
    /// Prepares profiling of a run on `device`, which is `selected`. For a GPU this must come
    /// before its first use: it sets the CubeCL configuration of the process, based on files and
    /// the environment. The table is also written to `file`.
    ///
    /// # Errors
    /// A device that cannot be profiled.
    pub fn prepare<B: Backend>(
        steps: [usize; 2],
        file: Option<PathBuf>,
        selected: &SelectedDevice,
        device: &B::Device,
    ) -> anyhow::Result<Self> {
        let source = match selected {
            SelectedDevice::Cpu => TimeSource::Host,
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            _ => TimeSource::Device(device::KernelLog::open(device)?),
            #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
            _ => return Err(cannot_profile(device)),
        };
        Ok(Self { steps, file, device: selected.to_string(), source, window: None })
    }

    /// Called before a step, numbered from 1. The first step in the window opens it.
    ///
    /// # Errors
    /// A device that fails, and a log of kernels that cannot be read.
    pub fn before_step<B: Backend>(&mut self, step: usize, device: &B::Device) -> anyhow::Result<()> {
        let is_in_window = (self.steps[0]..=self.steps[1]).contains(&step);
        if !is_in_window || self.window.is_some() {
            return Ok(());
        }
        sync::<B>(device)?;
        match &mut self.source {
            TimeSource::Host => start(),
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            TimeSource::Device(log) => log.begin(device)?,
        }
        self.window = Some((step, Instant::now()));
        Ok(())
    }

    /// Called after a step. The last step of the window closes it and gives the table.
    ///
    /// # Errors
    /// A file that cannot be written; a device that fails, and a log of kernels that cannot be read.
    pub fn after_step<B: Backend>(&mut self, step: usize, device: &B::Device) -> anyhow::Result<Option<ProfileTable>> {
        if self.window.is_none() {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            if let TimeSource::Device(log) = &mut self.source {
                log.discard()?;
            }
            return Ok(None);
        }
        if step < self.steps[1] {
            return Ok(None);
        }
        sync::<B>(device)?;
        let Some((first, since)) = self.window.take() else { return Ok(None) };
        let wall_seconds = since.elapsed().as_secs_f64();
        let (timing, rows) = match &mut self.source {
            TimeSource::Host => ("of each call, on the host", host_work()),
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            TimeSource::Device(log) => log.end(device)?,
        };
        let (device, steps) = (self.device.clone(), step + 1 - first);
        let table = ProfileTable { device, timing, first_step: first, steps, wall_seconds, rows }.finish();
        if let Some(path) = &self.file {
            atomic::replace_json(path, &table).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Some(table))
    }
}

/// Stops timing if a run ends within the window.
impl Drop for Profiler {
    fn drop(&mut self) {
        if let (TimeSource::Host, Some(_)) = (&self.source, &self.window) {
            stop();
        }
    }
}

fn host_work() -> Vec<ProfileRow> {
    let row = |entry: Entry| ProfileRow::new(entry.work.to_string(), entry.calls, entry.time.as_secs_f64());
    stop().into_iter().map(row).collect()
}

/// Error of a device whose backend's profiler was not compiled in.
fn cannot_profile(device: &impl std::fmt::Debug) -> anyhow::Error {
    anyhow!(
        "training.profile_steps: this build cannot profile {device:?}: enable the feature `wgpu` or `cuda` of the crate `trainer`"
    )
}

fn sync<B: Backend>(device: &B::Device) -> anyhow::Result<()> {
    B::sync(device).map_err(|error| device_failed("waiting for a profiled step", &error))
}
