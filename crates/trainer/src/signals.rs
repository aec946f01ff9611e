//! [`Signals`]: signals to stop a run.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
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
        // Under `nohup`, SIGHUP is ignored and must stay so.
        let hangup = if is_ignored(SIGHUP) { None } else { Some(SIGHUP) };
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
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
            SIGTERM => Some("SIGTERM"),
            SIGHUP => Some("SIGHUP"),
            _ => Some("SIGINT"),
        }
    }
}

/// Whether the process ignores a signal; true if Linux's `/proc` does not tell.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let bits = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_none_or(|bits| bits >> (signal - 1) & 1 == 1)
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
