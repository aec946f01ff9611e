//! Runs cases in worker processes, each case with a time limit: a GPU fault or a hang costs one
//! case, not the run.
//!
//! A worker that fails or exceeds its limit is killed, and a new worker continues with the next
//! case.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, atomic::AtomicUsize, atomic::Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::worker::{CaseEnd, MARK};

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time for the whole run. Cases that would begin later are not run.
    pub all: Duration,
    /// Time for one case, which includes compiling its kernels.
    pub case: Duration,
    /// Number of concurrent workers.
    pub jobs: usize,
}

/// Time that a worker may take to name its cases: the driver creates a context.
const START: Duration = Duration::from_secs(60);

/// Time that a killed worker may take to end: the driver destroys its context.
const END: Duration = Duration::from_secs(10);

/// Consecutive failed starts after which the remaining cases fail.
const MOST_FALSE_STARTS: usize = 3;

/// Outcome of a case.
#[derive(Debug)]
pub struct Done {
    /// Name of the case.
    pub name: String,
    /// Seconds from its turn to its result, which includes the start of a worker.
    pub seconds: f64,
    /// Value of the case, or its failure.
    pub result: Result<Value, CaseFailure>,
}

/// Reason for a missing result.
#[derive(Debug, thiserror::Error)]
pub enum CaseFailure {
    /// The case reported a failure.
    #[error("{0}")]
    Failed(String),
    /// The case exceeded its limit, in seconds.
    #[error("killed after {0} s")]
    TimedOut(u64),
    /// The worker process ended. Holds its status and its last output.
    #[error("its process ended: {0}")]
    Died(String),
    /// The time of the run ended before the case began, or before it was done within its own limit.
    #[error("no time left")]
    NoTime,
}

/// No worker starts, for example because the device is absent.
#[derive(Debug, thiserror::Error)]
#[error("no worker process: {0}")]
pub struct StartError(String);

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Number of finished cases.
    pub done: usize,
    /// Number of all cases.
    pub of: usize,
    /// Time since the start of the run.
    pub elapsed: Duration,
}

/// Runs all cases in worker processes and passes the outcome of each case to `each`.
///
/// `command` describes a process that calls [`Worker::serve`](crate::Worker::serve). The output of
/// workers is printed.
///
/// # Errors
/// No worker starts.
pub fn supervise(
    limits: Limits,
    command: &(dyn Fn() -> Command + Sync),
    each: &mut dyn FnMut(Progress, Done),
) -> Result<(), StartError> {
    let start = Instant::now();
    let mut first = Some(Worker::start(command(), limits.all)?);
    let names = first.as_mut().map(|worker| std::mem::take(&mut worker.names)).unwrap_or_default();
    let of = names.len();
    let (deadline, next, false_starts) = (start + limits.all, AtomicUsize::new(0), Mutex::new(0));
    let run = &Run { limits, deadline, command, names, next, false_starts };
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        for _ in 0..limits.jobs.clamp(1, of.max(1)) {
            let (sender, worker) = (sender.clone(), first.take());
            scope.spawn(move || run.serve(worker, &sender));
        }
        drop(sender);
        for (i, done) in receiver.into_iter().enumerate() {
            each(Progress { done: i + 1, of, elapsed: start.elapsed() }, done);
        }
    });
    Ok(())
}

/// State shared by the threads. Each thread controls one worker at a time.
struct Run<'a> {
    limits: Limits,
    deadline: Instant,
    command: &'a (dyn Fn() -> Command + Sync),
    names: Vec<String>,
    next: AtomicUsize,
    /// Failed starts since the last successful one.
    false_starts: Mutex<usize>,
}

impl Run<'_> {
    /// Runs cases until none is left.
    fn serve(&self, mut worker: Option<Worker>, sender: &Sender<Done>) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(name) = self.names.get(index) else { return };
            let start = Instant::now();
            let result = self.case(&mut worker, index);
            let done = Done { name: name.clone(), seconds: start.elapsed().as_secs_f64(), result };
            if sender.send(done).is_err() {
                return;
            }
        }
    }

    fn time_left(&self) -> Result<Duration, CaseFailure> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(CaseFailure::NoTime) } else { Ok(left) }
    }

    fn case(&self, slot: &mut Option<Worker>, index: usize) -> Result<Value, CaseFailure> {
        let mut worker = match slot.take() {
            Some(worker) => worker,
            None => self.restart()?,
        };
        let left = self.time_left()?;
        // A failed write means that the worker has died; reading gives the better error.
        let _ = writeln!(worker.stdin, "{index}");
        match worker.event(self.limits.case.min(left)) {
            Ok(CaseEnd { result, last }) => {
                if !last {
                    *slot = Some(worker);
                }
                result.map_err(CaseFailure::Failed)
            }
            Err(CaseFailure::TimedOut(_)) if left < self.limits.case => Err(CaseFailure::NoTime),
            Err(loss) => Err(loss),
        }
    }

    fn restart(&self) -> Result<Worker, CaseFailure> {
        // Held while a worker starts, so that threads do not all repeat a failed start at once.
        let mut failed = self.false_starts.lock().expect("no panic under this lock");
        if *failed == MOST_FALSE_STARTS {
            return Err(CaseFailure::Died("no worker starts any more".into()));
        }
        let started = Worker::start((self.command)(), self.time_left()?);
        if started.is_err() {
            // The worker may have had less time than a start needs.
            self.time_left()?;
        }
        *failed = if started.is_ok() { 0 } else { *failed + 1 };
        started.map_err(|error| CaseFailure::Died(error.to_string()))
    }
}

/// A worker process.
struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    names: Vec<String>,
    /// Last lines that it printed, for the error if it dies.
    tail: VecDeque<String>,
}

impl Worker {
    fn start(mut command: Command, limit: Duration) -> Result<Self, StartError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| StartError(format!("{command:?}: {error}")))?;
        let (sender, lines) = channel();
        let stdin = child.stdin.take().expect("piped");
        forward(child.stdout.take().expect("piped"), sender.clone());
        forward(child.stderr.take().expect("piped"), sender);
        let mut worker = Self { child, stdin, lines, names: vec![], tail: VecDeque::new() };
        worker.names = worker.event(START.min(limit)).map_err(|loss| StartError(loss.to_string()))?;
        Ok(worker)
    }

    /// Waits for the next event, which is a `T`. Prints all other lines.
    fn event<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, CaseFailure> {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let event = line.strip_prefix(MARK).and_then(|event| serde_json::from_str(event).ok());
                    if let Some(event) = event {
                        return Ok(event);
                    }
                    println!("  | {line}");
                    self.tail.push_back(line);
                    if self.tail.len() > 3 {
                        self.tail.pop_front();
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(CaseFailure::TimedOut(limit.as_secs())),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.end().map_or_else(|| "still running".into(), |status| status.to_string());
                    self.tail.push_front(status);
                    return Err(CaseFailure::Died(self.tail.make_contiguous().join("; ")));
                }
            }
        }
    }

    /// Waits for the process to end, up to a limit: a process that waits for a hung GPU cannot be
    /// killed.
    fn end(&mut self) -> Option<ExitStatus> {
        let end = Instant::now() + END;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                ended => return ended.ok().flatten(),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        self.end();
    }
}

/// Forwards output line by line until it ends.
fn forward(output: impl Read + Send + 'static, sender: Sender<String>) {
    std::thread::spawn(move || {
        let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
        // Without a receiver the supervisor has ended.
        let _ = lines.map(|line| String::from_utf8_lossy(&line).into_owned()).try_for_each(|line| sender.send(line));
    });
}
