//! [`Profiler`]: breaks down the time of some steps by kernel or operation.
//!
//! On a GPU, CubeCL times each kernel. This is decided when a device is first used, so it covers
//! all steps of the run. It waits for each kernel, so all steps are slower. On the CPU,
//! [`burn_float8::profile`] times Burn's operations, only within the window.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod device;
mod error;
mod kernels;
#[cfg(any(feature = "wgpu", feature = "cuda", test))]
mod log;
mod table;

use std::time::Instant;

use burn::tensor::backend::Backend;
use burn_float8::profile::{Work, start, stop};
use device_select::SelectedDevice;
pub use error::ProfileError;
pub use kernels::Kind;
pub use table::{ProfileRow, ProfileTable, Timing};

use crate::config::ProfileSection;
use crate::{TrainError, atomic};

/// Time spent on a kernel or operation in a window.
struct Spent {
    name: String,
    kind: Kind,
    calls: u64,
    seconds: f64,
}

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
    /// [`TrainError::Write`] for a `file` that cannot be written, [`TrainError::Profile`].
    pub fn prepare<B: Backend>(
        section: &ProfileSection,
        selected: &SelectedDevice,
        device: &B::Device,
    ) -> Result<Self, TrainError> {
        if let Some(path) = &section.file {
            atomic::check(path).map_err(|source| TrainError::Write { path: path.clone(), source })?;
        }
        let source = match selected {
            SelectedDevice::Cpu => Source::Host,
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            _ => Source::Device(device::KernelLog::open(device)?),
            #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
            _ => return Err(ProfileError::NotCompiled { device: format!("{device:?}") }.into()),
        };
        Ok(Self { section: section.clone(), device: selected.to_string(), source, window: None })
    }

    /// Called before a step, numbered from 1. The first step in the window opens it.
    ///
    /// # Errors
    /// [`TrainError::Execution`] if the device fails, [`TrainError::Profile`].
    pub fn before_step<B: Backend>(&mut self, step: usize, device: &B::Device) -> Result<(), TrainError> {
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
    /// [`TrainError::Execution`] if the device fails, [`TrainError::Write`],
    /// [`TrainError::Profile`].
    pub fn after_step<B: Backend>(
        &mut self,
        step: usize,
        device: &B::Device,
    ) -> Result<Option<ProfileTable>, TrainError> {
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
        let wall = since.elapsed().as_secs_f64();
        let (timing, spent) = match &mut self.source {
            Source::Host => (Timing::Call, host_work()),
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Source::Device(log) => log.end(device)?,
        };
        let table = ProfileTable::new(self.device.clone(), timing, first..=step, wall, spent);
        if let Some(path) = &self.section.file {
            atomic::replace_json(path, &table).map_err(|source| TrainError::Write { path: path.clone(), source })?;
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

fn host_work() -> Vec<Spent> {
    let kind = |work| match work {
        Work::Cast { .. } => Kind::Cast,
        Work::ScaledGemm(_) => Kind::ScaledGemm,
        _ => Kind::Other,
    };
    let entries = stop().into_iter();
    let spent = entries.map(|entry| Spent {
        name: entry.work.to_string(),
        kind: kind(entry.work),
        calls: entry.calls,
        seconds: entry.time.as_secs_f64(),
    });
    spent.collect()
}

fn sync<B: Backend>(device: &B::Device) -> Result<(), TrainError> {
    B::sync(device)
        .map_err(|error| TrainError::Execution { doing: "waiting for a profiled step", reason: error.to_string() })
}
