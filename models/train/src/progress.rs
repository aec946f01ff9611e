//! A line at the bottom of the terminal that says how far something is; nothing where standard error is no terminal.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// How often a log that is no terminal is told how far a task is.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub bytes: u64,
    /// Bytes to do; of Parquet files about as many.
    pub total_bytes: u64,
}

/// The line. Clones are the same one.
#[derive(Clone, Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    /// Why a [`Log`] above it could not be written.
    failure: Arc<Mutex<Option<io::Error>>>,
}

impl ProgressLine {
    /// A line on standard error, if that is a terminal.
    pub fn new() -> Self {
        match io::stderr().is_terminal() {
            true => Self::of(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())),
            false => Self::hidden(),
        }
    }

    /// No line.
    pub fn hidden() -> Self {
        Self::of(ProgressBar::hidden())
    }

    fn of(bar: ProgressBar) -> Self {
        Self { bar, failure: Arc::default() }
    }

    fn failure(&self) -> MutexGuard<'_, Option<io::Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something of the [`Log`] could not be written.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure().is_some()
    }

    /// Whether all of the [`Log`] was written so far.
    ///
    /// # Errors
    /// The system's reason, if not.
    pub fn check_log(&self) -> io::Result<()> {
        self.failure().take().map_or(Ok(()), Err)
    }

    /// `{left}` in the template is the time left, once something has been done.
    fn begin(&self, template: &str, done: u64, total: u64) {
        let left = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            // A line that cannot be written is not drawn.
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
        // Time left is told by what is made from here on.
        self.bar.reset_eta();
    }

    /// Steps begin, of which so many are done.
    pub(crate) fn begin_steps(&self, done: usize, total: usize) {
        self.begin("step {pos}/{len} [{bar:25}] {msg}  {left}", done as u64, total as u64);
    }

    /// A step is made.
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

    /// Runs a task that says how many bytes it has done, `what` being what it does with them: `tokenized`. Where there is no line,
    /// that goes to `out` every ten seconds.
    ///
    /// # Errors
    /// A log that cannot be written, once the task has ended.
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

/// A log that is written above a [`ProgressLine`]. Writing never fails, so that a run whose terminal is closed, or whose disk is full,
/// comes to where it is saved; what could not be written is told by [`ProgressLine::check_log`].
pub struct Log<'a> {
    out: &'a mut dyn Write,
    line: ProgressLine,
}

impl<'a> Log<'a> {
    /// Writes to `out`.
    pub fn new(out: &'a mut dyn Write, line: &ProgressLine) -> Self {
        Self { out, line: line.clone() }
    }

    fn try_to(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.line.has_failed() {
            return;
        }
        if let Err(error) = self.line.bar.suspend(|| write(self.out)) {
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
