//! Progress line at the bottom of the terminal. Nothing is shown if standard error is not a
//! terminal.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Interval of progress lines in a log that is not a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Processed bytes.
    pub bytes: u64,
    /// Total bytes; approximate for Parquet files.
    pub total_bytes: u64,
}

/// Progress line. Clones share it.
#[derive(Clone, Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    /// First error of a [`Log`] above the line.
    failure: Arc<Mutex<Option<io::Error>>>,
}

impl ProgressLine {
    /// Line on standard error, if it is a terminal.
    pub fn new() -> Self {
        match io::stderr().is_terminal() {
            true => Self::of(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())),
            false => Self::hidden(),
        }
    }

    /// Hidden line.
    pub fn hidden() -> Self {
        Self::of(ProgressBar::hidden())
    }

    fn of(bar: ProgressBar) -> Self {
        Self { bar, failure: Arc::default() }
    }

    fn failure(&self) -> MutexGuard<'_, Option<io::Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a write to the [`Log`] failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure().is_some()
    }

    /// Checks that the whole [`Log`] was written so far.
    ///
    /// # Errors
    /// The system's reason, if not.
    pub fn check_log(&self) -> io::Result<()> {
        self.failure().take().map_or(Ok(()), Err)
    }

    /// Shows the line. `{left}` in the template is the remaining time, once there is progress.
    fn begin(&self, template: &str, done: u64, total: u64) {
        let left = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            // A failed write of the line is ignored.
            let _ = match state.pos() > done {
                true => write!(out, "{:#} left", HumanDuration(state.eta())),
                false => Ok(()),
            };
        };
        let style = ProgressStyle::with_template(template).expect("a template of this file");
        // Before the reset, which draws.
        self.bar.set_style(style.progress_chars("=> ").with_key("left", left));
        self.bar.set_length(total);
        self.bar.reset();
        self.bar.set_position(done);
        // The remaining time is based on progress from here on.
        self.bar.reset_eta();
    }

    /// Shows the progress of steps; `done` steps are completed.
    pub(crate) fn begin_steps(&self, done: usize, total: usize) {
        self.begin("step {pos}/{len} [{bar:25}] {msg}  {left}", done as u64, total as u64);
    }

    /// Updates the number of completed steps.
    pub(crate) fn set_step(&self, done: usize, loss: Option<f64>) {
        if let Some(loss) = loss {
            self.bar.set_message(format!("loss {loss:.4}"));
        }
        self.bar.set_position(done as u64);
    }

    /// Removes the line.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }

    /// Runs a task that reports bytes; `what` names it: `tokenized`. Without a progress line,
    /// progress is written to `out` every ten seconds.
    ///
    /// # Errors
    /// A log that cannot be written, after the task has ended.
    pub fn track<T>(
        &self,
        what: &str,
        out: &mut dyn Write,
        task: impl FnOnce(&mut dyn FnMut(Progress)) -> T,
    ) -> io::Result<T> {
        let (mut has_begun, mut since, mut written) = (false, Instant::now(), Ok(()));
        let result = task(&mut |Progress { bytes, total_bytes }| {
            if !has_begun {
                self.begin(&format!("{what} {{bytes}} of {{total_bytes}} [{{bar:25}}] {{left}}"), 0, total_bytes);
                has_begun = true;
            }
            self.bar.set_position(bytes);
            if self.bar.is_hidden() && written.is_ok() && since.elapsed() >= PLAIN_INTERVAL {
                let [done, all] = [bytes, total_bytes].map(|bytes| bytes as f64 / 1e6);
                written = writeln!(out, "{what}: {done:.0} of {all:.0} MB");
                since = Instant::now();
            }
        });
        self.end();
        written.map(|()| result)
    }
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}

/// Log above a [`ProgressLine`]. Writing never fails, so a run with a closed terminal or a full
/// disk continues until it is saved. [`ProgressLine::check_log`] returns the first error.
pub struct Log<'a> {
    out: &'a mut dyn Write,
    line: ProgressLine,
}

impl<'a> Log<'a> {
    /// Log that writes to `out`.
    pub fn new(out: &'a mut dyn Write, line: &ProgressLine) -> Self {
        Self { out, line: line.clone() }
    }

    fn try_to(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.line.has_failed() {
            return;
        }
        // A bar without a length has not begun: to suspend it would draw it.
        let bar = &self.line.bar;
        let written = if bar.length().is_none() { write(self.out) } else { bar.suspend(|| write(self.out)) };
        if let Err(error) = written {
            self.line.failure().get_or_insert(error);
        }
    }
}

impl Write for Log<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.try_to(|out| out.write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.try_to(|out| out.flush());
        Ok(())
    }

    fn write_fmt(&mut self, text: fmt::Arguments<'_>) -> io::Result<()> {
        self.try_to(|out| out.write_fmt(text));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_without_a_terminal_says_little() {
        let mut out = vec![];
        let line = ProgressLine::hidden();
        let done = line.track("tokenized", &mut out, |progress| {
            progress(Progress { bytes: 1, total_bytes: 2 });
            7
        });
        assert_eq!((done.unwrap(), out.len()), (7, 0));
    }

    #[test]
    fn a_log_is_what_was_written() {
        let mut out = vec![];
        let line = ProgressLine::hidden();
        line.begin_steps(0, 3);
        let mut log = Log::new(&mut out, &line);
        writeln!(log, "step {}", 1).unwrap();
        line.set_step(1, Some(2.0));
        log.write_all(b"step 2\n").unwrap();
        line.end();
        assert_eq!(out, b"step 1\nstep 2\n");
        line.check_log().unwrap();
    }

    #[test]
    fn a_log_that_cannot_be_written_is_told_later() {
        let mut room = [0; 7];
        let mut out = &mut room[..];
        let line = ProgressLine::hidden();
        let mut log = Log::new(&mut out, &line);
        for step in 1..4 {
            writeln!(log, "step {step}").unwrap();
        }
        assert!(line.has_failed());
        assert_eq!(line.check_log().unwrap_err().kind(), io::ErrorKind::WriteZero);
        assert_eq!(&room, b"step 1\n");
    }
}
