//! [`Signals`]: what the system asks of a run.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether the process has been told to stop. The first SIGINT, SIGTERM or SIGHUP (its terminal was closed) is noted here, a second one
/// ends the process.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    stop: Arc<AtomicUsize>,
}

impl Signals {
    /// Listens from now on, for as long as the process lives.
    ///
    /// # Errors
    /// The system's.
    pub fn listen() -> io::Result<Self> {
        let signals = Self::default();
        let again = Arc::new(AtomicBool::new(false));
        // Under `nohup` SIGHUP is ignored; a program that listens to it would end.
        let hangup = if is_ignored(SIGHUP) { None } else { Some(SIGHUP) };
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
            // In this order: it is the second signal that finds the flag set.
            flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
            flag::register(signal, again.clone())?;
            flag::register_usize(signal, signals.stop.clone(), signal as usize)?;
        }
        Ok(signals)
    }

    /// The name of the signal that told the process to stop.
    pub fn stop(&self) -> Option<&'static str> {
        match self.stop.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGTERM => Some("SIGTERM"),
            SIGHUP => Some("SIGHUP"),
            _ => Some("SIGINT"),
        }
    }
}

/// Whether the process ignores a signal; where the system does not tell it in Linux's `/proc`, yes.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let bits = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_none_or(|bits| bits >> (signal - 1) & 1 == 1)
}

/// Makes a file that exceeds the limit on its size an error like others, not the end of the process.
///
/// # Errors
/// The system's.
pub fn file_limits_are_errors() -> io::Result<()> {
    #[cfg(unix)]
    flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}
