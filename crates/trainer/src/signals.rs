//! [`Signals`]: signals to stop a run.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Records a signal to stop. The first SIGINT, SIGTERM, SIGHUP (closed terminal) or SIGUSR1, which
/// `mpirun` forwards, is recorded, a second one ends the process.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    stop: Arc<AtomicUsize>,
}

impl Signals {
    /// Installs handlers for the rest of the process.
    ///
    /// # Errors
    /// The system's.
    pub fn listen() -> io::Result<Self> {
        let signals = Self::default();
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM].into_iter().chain(user()).chain(hangup()) {
            // The order matters: the second signal must find the flag set.
            flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
            flag::register(signal, again.clone())?;
            flag::register_usize(signal, signals.stop.clone(), signal as usize)?;
        }
        Ok(signals)
    }

    /// Name of the received signal.
    pub fn stop(&self) -> Option<&'static str> {
        match self.stop.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some("SIGINT"),
            SIGTERM => Some("SIGTERM"),
            signal if Some(signal) == user() => Some("SIGUSR1"),
            _ => Some("SIGHUP"),
        }
    }
}

/// Starts `mpirun` and waits for it. Returns its exit code, or 128 and the signal that ended the job.
/// The first signal to stop goes to all ranks as SIGUSR1, because `mpirun` kills ranks a second after
/// SIGINT; a second one ends the job.
///
/// # Errors
/// The system's.
#[cfg(all(unix, feature = "mpi"))]
pub(crate) fn wait_for_ranks(mpirun: &mut std::process::Command) -> io::Result<i32> {
    let stop = Arc::new(AtomicUsize::new(0));
    for signal in [SIGINT, SIGTERM].into_iter().chain(hangup()).chain(user()) {
        flag::register_usize(signal, stop.clone(), signal as usize)?;
    }
    let mut mpirun = mpirun.spawn()?;
    let mut first = None;
    loop {
        if let Some(status) = mpirun.try_wait()? {
            return Ok(match first {
                Some(signal) if !status.success() => 128 + signal,
                _ => status.code().unwrap_or(1),
            });
        }
        let signal = stop.swap(0, Ordering::Relaxed) as i32;
        if signal != 0 {
            let passed = if first.is_none() { libc::SIGUSR1 } else { SIGTERM };
            // SAFETY: the process is a child that has not been waited for, so its number is its own.
            unsafe { libc::kill(mpirun.id() as i32, passed) };
            first.get_or_insert(signal);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// SIGUSR1, where it exists.
fn user() -> Option<i32> {
    #[cfg(unix)]
    return Some(libc::SIGUSR1);
    #[cfg(not(unix))]
    None
}

/// SIGHUP, unless the process ignores it: under `nohup` it must stay ignored.
#[cfg(unix)]
fn hangup() -> Option<i32> {
    // SAFETY: all fields of the structure may be 0.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action, the call only writes the present one to `now`.
    let failed = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), &raw mut now) } != 0;
    (!failed && now.sa_sigaction != libc::SIG_IGN).then_some(libc::SIGHUP)
}

#[cfg(not(unix))]
fn hangup() -> Option<i32> {
    None
}

/// Makes exceeding the file size limit an ordinary error instead of ending the process.
///
/// # Errors
/// The system's.
pub fn file_limits_are_errors() -> io::Result<()> {
    #[cfg(unix)]
    flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}
