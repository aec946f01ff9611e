//! Starts the ranks of a case; collects their output and exit status.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Variable that selects the case of a rank.
pub const CASE: &str = "FLOAT8_COMM_TEST_CASE";
/// Time limit of a case.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Result of a case.
pub struct Ran {
    pub ranks: usize,
    pub code: Option<i32>,
    ended: f64,
    /// Output on both streams.
    pub output: String,
}

const WRONG: &str = "it goes wrong at ";

/// Marks the start of the failure for the runner's timing.
pub fn goes_wrong() {
    print_line(&format!("{WRONG}{}", now()));
}

/// Prints in one write, so that lines of ranks do not interleave.
pub fn print_line(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).expect("stderr is open");
}

/// Slowdown of this program by others on the same cores.
pub fn crowding() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    let load = load.and_then(|text| text.split(' ').next()?.parse::<f64>().ok()).unwrap_or(1.0);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (load / cores as f64).max(1.0)
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

/// Runs a case under mpirun, or as a plain process with 0 ranks.
pub fn run(name: &str, ranks: usize) -> Ran {
    let program = std::env::current_exe().expect("a test knows its program");
    let mut command = if ranks == 0 {
        Command::new(&program)
    } else {
        let mut command = Command::new("mpirun");
        command.args(["--oversubscribe", "-n", &ranks.to_string()]).arg(&program);
        // Containers build as root, which mpirun rejects without both.
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    };
    command.env(CASE, name).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().expect("mpirun starts");
    let streams: [Box<dyn Read + Send>; 2] =
        [Box::new(child.stdout.take().expect("piped")), Box::new(child.stderr.take().expect("piped"))];
    let readers = streams.map(|mut stream| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            _ = stream.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let (code, ended) = loop {
        if let Some(status) = child.try_wait().expect("mpirun is a child") {
            break (status.code(), now());
        }
        if start.elapsed() > LIMIT {
            child.kill().expect("mpirun is a child");
            _ = child.wait();
            let output = readers.map(|reader| reader.join().expect("reads")).concat();
            panic!("{name} with {ranks} ranks hangs: {output}");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let output = readers.map(|reader| reader.join().expect("reads")).concat();
    Ran { ranks, code, ended, output }
}

impl Ran {
    /// Asserts that every rank ended successfully.
    pub fn succeeds(&self) {
        assert_eq!(self.code, Some(0), "{}", self.output);
        let done = self.output.matches("rank is done").count();
        assert_eq!(done, self.ranks, "{}", self.output);
    }

    /// Asserts that the job failed within `seconds` of the first [`goes_wrong`]. Returns the time
    /// taken.
    pub fn fails_within(&self, seconds: f64) -> f64 {
        assert!(self.code.is_some_and(|code| code != 0), "code {:?}: {}", self.code, self.output);
        let times = self.output.lines().filter_map(|line| line.split_once(WRONG)?.1.trim().parse::<f64>().ok());
        let took = self.ended - times.reduce(f64::min).unwrap_or_else(|| panic!("nothing went wrong: {}", self.output));
        assert!(took < seconds * crowding(), "{took:.1} s: {}", self.output);
        took
    }

    /// Time in seconds and error with which rank `rank` ended.
    pub fn error(&self, rank: usize) -> (f64, &str) {
        self.printed(rank).unwrap_or_else(|| panic!("rank {rank} printed no error: {}", self.output))
    }

    /// The same, unless the first rank that exited ended the job before this one had printed: on a
    /// loaded machine the time that ranks leave each other may be too short.
    pub fn printed(&self, rank: usize) -> Option<(f64, &str)> {
        let head = format!("rank {rank} failed after ");
        let (_, line) = self.output.lines().find_map(|line| line.split_once(&head))?;
        let (seconds, error) = line.split_once(" s: ").expect("seconds");
        Some((seconds.parse().expect("a number"), error))
    }

    /// Asserts that these ranks, as far as they printed an error, named an absent one.
    pub fn names(&self, ranks: impl IntoIterator<Item = usize>, absent: &str) {
        let errors: Vec<_> = ranks.into_iter().filter_map(|rank| self.printed(rank)).collect();
        assert!(!errors.is_empty() && errors.iter().all(|(_, error)| error.contains(absent)), "{}", self.output);
    }

    /// Measurements that ranks printed.
    pub fn notes(&self) -> String {
        self.output
            .lines()
            .filter_map(|line| line.split_once("measured: "))
            .map(|(_, note)| format!("; {note}"))
            .collect()
    }
}
