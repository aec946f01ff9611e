//! Jobs of ranks that run cases, with their output and exit status.
use std::io::{Read, Seek, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Time limit of a job.
const LIMIT: Duration = Duration::from_secs(if cfg!(feature = "staged") { 3600 } else { 600 });

/// Limit in seconds for a job to end after a rank fails.
pub const END: f64 = 5.0;

/// Result of a job.
pub struct Ran {
    pub ranks: usize,
    pub status: ExitStatus,
    ended: f64,
    /// Output on both streams. A job whose output is shown has none.
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
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (load / cores as f64).max(1.0)
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

/// Runs cases under mpirun, or as a plain process with 0 ranks. Their output is shown, or read after the end.
pub fn run(names: &[&str], ranks: usize, is_shown: bool) -> Ran {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(if ranks == 0 { program.as_os_str() } else { "mpirun".as_ref() });
    if ranks > 0 {
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]).arg(&program);
    }
    command.arg("--cases").args(names).env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
    let mut file = tempfile::tempfile().expect("a folder for temporary files");
    if !is_shown {
        let [stdout, stderr] = [(); 2].map(|()| file.try_clone().expect("an open file"));
        command.env("FLOAT8_COMM_TIMEOUT", "20").stdout(stdout).stderr(stderr);
    }
    let begin = Instant::now();
    let mut child = command.spawn().expect("mpirun is installed (apt: openmpi-bin)");
    let mut read = || {
        let mut output = vec![];
        file.rewind().and_then(|()| file.read_to_end(&mut output)).expect("a file of output");
        String::from_utf8_lossy(&output).into_owned()
    };
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Ran { ranks, status, ended: now(), output: read() };
        }
        if begin.elapsed() > LIMIT {
            child.kill().and_then(|()| child.wait()).expect("a child can be killed");
            panic!("{names:?} on {ranks} ranks have not ended after {LIMIT:?}: {}", read());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Ran {
    /// Asserts that every rank ended successfully.
    pub fn succeeds(&self) {
        assert!(self.status.success(), "{}: {}", self.status, self.output);
    }

    /// Asserts that the job failed, and printed these words in this order.
    pub fn fails_with(&self, words: &[&str]) {
        assert!(!self.status.success(), "it has succeeded: {}", self.output);
        let mut rest = &self.output[..];
        for word in words {
            let found = rest.split_once(word);
            (_, rest) = found.unwrap_or_else(|| panic!("it does not say {word:?}: {}", self.output));
        }
    }

    /// Asserts that the job failed with this exit status and these words, soon after the first
    /// [`goes_wrong`].
    pub fn ends(&self, code: i32, words: &[&str]) {
        self.fails_within(END);
        self.fails_with(words);
        assert_eq!(self.status.code(), Some(code), "{}", self.output);
    }

    /// Asserts that the job failed within `seconds` of the first [`goes_wrong`].
    pub fn fails_within(&self, seconds: f64) {
        self.fails_with(&[]);
        let times = self.output.lines().filter_map(|line| line.split_once(WRONG)?.1.trim().parse::<f64>().ok());
        let took = self.ended - times.reduce(f64::min).unwrap_or_else(|| panic!("nothing went wrong: {}", self.output));
        assert!(took < seconds * crowding(), "{took:.1} s: {}", self.output);
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
}
