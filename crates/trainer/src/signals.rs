//! [`Signals`]: signals to stop a run.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Records a signal to stop. The first SIGINT, SIGTERM or SIGHUP (closed terminal) is recorded, a
/// second one ends the process.
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
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup()) {
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
            _ => Some("SIGHUP"),
        }
    }
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
