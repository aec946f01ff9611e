//! Runs cases in worker processes, each case with a limit: a fault of the GPU or a hang costs one case, not the run.
//!
//! A worker that fails or overstays is killed, and a new one goes on with the next case.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, atomic::AtomicUsize, atomic::Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::worker::{Event, MARK};

/// Bounds of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For all; cases that would begin later are not run.
    pub all: Duration,
    /// For one case, compiling its kernels included.
    pub case: Duration,
    /// Workers at once.
    pub jobs: usize,
}

/// A worker may need this long until it has named its cases: the driver makes a context.
const START: Duration = Duration::from_secs(60);

/// A killed worker may need this long to end: the driver tears its context down.
const END: Duration = Duration::from_secs(10);

/// Failed starts in a row after which the remaining cases are given up.
const MOST_FALSE_STARTS: usize = 3;

/// What became of a case.
#[derive(Debug)]
pub struct Done {
    /// The name of the case.
    pub name: String,
    /// From its turn to its result, the start of a worker included.
    pub seconds: f64,
    /// What it gave.
    pub result: Result<Value, CaseFailure>,
}

/// Why a case has no result.
#[derive(Debug, thiserror::Error)]
pub enum CaseFailure {
    /// It said so.
    #[error("{0}")]
    Failed(String),
    /// It was not done within its limit, in seconds.
    #[error("killed after {0} s")]
    TimedOut(u64),
    /// Its process ended, with its status and what it printed last.
    #[error("its process ended: {0}")]
    Died(String),
    /// The time for all was over before it began, or before it was done and its own limit was over.
    #[error("no time left")]
    NoTime,
}

/// No worker starts: the device is absent, say.
#[derive(Debug, thiserror::Error)]
#[error("no worker process: {0}")]
pub struct StartError(String);

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Cases that are over.
    pub done: usize,
    /// All cases.
    pub of: usize,
    /// Since the beginning.
    pub elapsed: Duration,
}

/// Runs all cases in processes that `command` describes, which call [`Worker::serve`](crate::Worker::serve), and hands on what became
/// of each case, as it is known. What workers print is printed.
///
/// # Errors
/// No worker starts.
pub fn supervise(
    limits: Limits,
    command: &(dyn Fn() -> Command + Sync),
    each: &mut dyn FnMut(Progress, Done),
) -> Result<(), StartError> {
    let start = Instant::now();
    let deadline = start + limits.all;
    let first = Worker::start(command(), deadline)?;
    let names = first.names.clone();
    let next = AtomicUsize::new(0);
    let (sender, receiver) = channel();
    let run = Run { limits, deadline, command, names: &names, next: &next, false_starts: &Mutex::new(0) };
    std::thread::scope(|scope| {
        let mut first = Some(first);
        for _ in 0..limits.jobs.clamp(1, names.len().max(1)) {
            let (sender, worker) = (sender.clone(), first.take());
            scope.spawn(move || run.serve(worker, &sender));
        }
        drop(sender);
        for (i, done) in receiver.into_iter().enumerate() {
            each(Progress { done: i + 1, of: names.len(), elapsed: start.elapsed() }, done);
        }
    });
    Ok(())
}

/// What the threads share, each of which controls one worker at a time.
#[derive(Clone, Copy)]
struct Run<'a> {
    limits: Limits,
    deadline: Instant,
    command: &'a (dyn Fn() -> Command + Sync),
    names: &'a [String],
    next: &'a AtomicUsize,
    /// Failed starts since a worker last started.
    false_starts: &'a Mutex<usize>,
}

impl Run<'_> {
    /// Takes cases until none is left.
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

    fn case(&self, slot: &mut Option<Worker>, index: usize) -> Result<Value, CaseFailure> {
        let mut worker = match slot.take() {
            Some(worker) => worker,
            None => self.restart()?,
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(CaseFailure::NoTime);
        }
        let limit = self.limits.case.min(left);
        let (result, last) = worker.run(index, limit).map_err(|loss| match loss {
            CaseFailure::TimedOut(_) if limit < self.limits.case => CaseFailure::NoTime,
            loss => loss,
        })?;
        if !last {
            *slot = Some(worker);
        }
        result.map_err(CaseFailure::Failed)
    }

    fn restart(&self) -> Result<Worker, CaseFailure> {
        // Held while a worker starts, so that threads do not all try at once what just failed.
        let mut failed = self.false_starts.lock().expect("no panic under this lock");
        if *failed == MOST_FALSE_STARTS {
            return Err(CaseFailure::Died("no worker starts any more".into()));
        }
        if self.deadline <= Instant::now() {
            return Err(CaseFailure::NoTime);
        }
        match Worker::start((self.command)(), self.deadline) {
            Ok(worker) => {
                *failed = 0;
                Ok(worker)
            }
            // It had less time than a start may need.
            Err(_) if self.deadline <= Instant::now() => Err(CaseFailure::NoTime),
            Err(error) => {
                *failed += 1;
                Err(CaseFailure::Died(error.to_string()))
            }
        }
    }
}

/// A worker process.
struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<Line>,
    names: Vec<String>,
    /// What it last printed, for when it dies.
    tail: VecDeque<String>,
}

/// A line that a worker printed.
enum Line {
    Event(Event),
    Text(String),
}

impl Worker {
    fn start(mut command: Command, deadline: Instant) -> Result<Self, StartError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| StartError(format!("{command:?}: {error}")))?;
        let (sender, lines) = channel();
        let stdin = child.stdin.take().expect("piped");
        forward(child.stdout.take().expect("piped"), sender.clone());
        forward(child.stderr.take().expect("piped"), sender);
        let mut worker = Self { child, stdin, lines, names: vec![], tail: VecDeque::new() };
        match worker.event(START.min(deadline.saturating_duration_since(Instant::now()))) {
            Ok(Event::Cases(names)) => worker.names = names,
            Ok(Event::Done { .. }) => return Err(StartError("it ran a case before it was asked to".into())),
            Err(loss) => return Err(StartError(loss.to_string())),
        }
        Ok(worker)
    }

    /// The result of a case, and whether it was this worker's last.
    fn run(&mut self, index: usize, limit: Duration) -> Result<(Result<Value, String>, bool), CaseFailure> {
        // A worker that cannot be written to has died, which reading says better.
        let _ = writeln!(self.stdin, "{index}");
        match self.event(limit)? {
            Event::Done { result, last } => Ok((result, last)),
            Event::Cases(_) => Err(CaseFailure::Died("it named its cases again".into())),
        }
    }

    /// Waits for the next event; prints all else.
    fn event(&mut self, limit: Duration) -> Result<Event, CaseFailure> {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Line::Event(event)) => return Ok(event),
                Ok(Line::Text(text)) => {
                    println!("  | {text}");
                    self.tail.push_back(text);
                    if self.tail.len() > 3 {
                        self.tail.pop_front();
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(CaseFailure::TimedOut(limit.as_secs())),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.end().map_or_else(|| "still running".into(), |status| status.to_string());
                    let tail: Vec<_> = self.tail.drain(..).collect();
                    return Err(CaseFailure::Died([status].into_iter().chain(tail).collect::<Vec<_>>().join("; ")));
                }
            }
        }
    }

    /// Waits for the end of the process, but not for ever: one that waits for a hung GPU cannot be killed.
    fn end(&mut self) -> Option<std::process::ExitStatus> {
        let end = Instant::now() + END;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.end();
    }
}

/// Sends on what is printed, line by line, until its end.
fn forward(output: impl Read + Send + 'static, sender: Sender<Line>) {
    std::thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            let event = line.strip_prefix(MARK).and_then(|event| serde_json::from_str(event).ok());
            if sender.send(event.map_or_else(|| Line::Text(line), Line::Event)).is_err() {
                return;
            }
        }
    });
}
