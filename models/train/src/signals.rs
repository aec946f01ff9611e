//! [`Signals`]: what the system asks of a run.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether the process has been told to stop. The first SIGINT or SIGTERM is noted here, a second one ends the process.
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
        for signal in [SIGINT, SIGTERM] {
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
            _ => Some("SIGINT"),
        }
    }
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
