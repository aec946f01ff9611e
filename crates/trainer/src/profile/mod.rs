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

use std::time::Instant;

use anyhow::{Context, anyhow};
use burn::tensor::backend::Backend;
use burn_float8::profile::{Entry, Work, start, stop};
use device_select::SelectedDevice;
pub use table::{Kind, ProfileRow, ProfileTable};

use crate::atomic;
use crate::config::ProfileSection;
use crate::error::device_failed;

/// Source of the times.
#[derive(Debug)]
enum Source {
    Host,
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    Device(device::KernelLog),
}

/// Profiles the steps of a window.
#[derive(Debug)]
pub struct Profiler {
    section: ProfileSection,
    device: String,
    source: Source,
    /// First step and start time of an open window.
    window: Option<(usize, Instant)>,
}

impl Profiler {
    /// Prepares profiling of a run on `device`, which is `selected`. For a GPU this must come
    /// before its first use: it sets the CubeCL configuration of the process, based on files and
    /// the environment.
    ///
    /// # Errors
    /// A `file` that cannot be written; a device that cannot be profiled.
    pub fn prepare<B: Backend>(
        section: &ProfileSection,
        selected: &SelectedDevice,
        device: &B::Device,
    ) -> anyhow::Result<Self> {
        if let Some(path) = &section.file {
            atomic::check(path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let source = match selected {
            SelectedDevice::Cpu => Source::Host,
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            _ => Source::Device(device::KernelLog::open(device)?),
            #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
            _ => return Err(cannot_profile(device)),
        };
        Ok(Self { section: section.clone(), device: selected.to_string(), source, window: None })
    }

    /// Called before a step, numbered from 1. The first step in the window opens it.
    ///
    /// # Errors
    /// A device that fails, and a log of kernels that cannot be read.
    pub fn before_step<B: Backend>(&mut self, step: usize, device: &B::Device) -> anyhow::Result<()> {
        let is_in_window = (self.section.start..=self.section.last()).contains(&step);
        if !is_in_window || self.window.is_some() {
            return Ok(());
        }
        sync::<B>(device)?;
        match &mut self.source {
            Source::Host => start(),
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Source::Device(log) => log.begin(device)?,
        }
        self.window = Some((step, Instant::now()));
        Ok(())
    }

    /// Called after a step. The last step of the window closes it; the table is then also written
    /// to `file`.
    ///
    /// # Errors
    /// A file that cannot be written; a device that fails, and a log of kernels that cannot be read.
    pub fn after_step<B: Backend>(&mut self, step: usize, device: &B::Device) -> anyhow::Result<Option<ProfileTable>> {
        if self.window.is_none() {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            if let Source::Device(log) = &mut self.source {
                log.discard()?;
            }
            return Ok(None);
        }
        if step < self.section.last() {
            return Ok(None);
        }
        sync::<B>(device)?;
        let Some((first, since)) = self.window.take() else { return Ok(None) };
        let wall_seconds = since.elapsed().as_secs_f64();
        let (timing, rows) = match &mut self.source {
            Source::Host => ("of each call, on the host", host_work()),
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Source::Device(log) => log.end(device)?,
        };
        let (device, steps) = (self.device.clone(), step + 1 - first);
        let table = ProfileTable { device, timing, first_step: first, steps, wall_seconds, rows }.finish();
        if let Some(path) = &self.section.file {
            atomic::replace_json(path, &table).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Some(table))
    }
}

/// Stops timing if a run ends within the window.
impl Drop for Profiler {
    fn drop(&mut self) {
        if let (Source::Host, Some(_)) = (&self.source, &self.window) {
            stop();
        }
    }
}

fn host_work() -> Vec<ProfileRow> {
    let row = |entry: Entry| ProfileRow {
        name: entry.work.to_string(),
        kind: match entry.work {
            Work::Cast { .. } => Kind::Cast,
            Work::ScaledGemm(_) => Kind::ScaledGemm,
            _ => Kind::Other,
        },
        calls: entry.calls,
        seconds: entry.time.as_secs_f64(),
    };
    stop().into_iter().map(row).collect()
}

/// Error of a device whose backend's profiler was not compiled in.
fn cannot_profile(device: &impl std::fmt::Debug) -> anyhow::Error {
    anyhow!(
        "[profile]: this build cannot profile {device:?}: enable the feature `wgpu` or `cuda` of the crate `trainer`"
    )
}

fn sync<B: Backend>(device: &B::Device) -> anyhow::Result<()> {
    B::sync(device).map_err(|error| device_failed("waiting for a profiled step", &error))
}
