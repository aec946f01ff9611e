//! Program of a [`TrainableModel`]: [`main`] wraps it, [`start`] sets up its ranks, and [`run`] runs
//! a [`Job`] on the selected backend.

use std::io::{IsTerminal, Write};
use std::num::NonZero;
use std::process::ExitCode;

use anyhow::{Context, Error, Result, anyhow, bail};
use device_select::{SelectedDevice, quiet_wayland, select};
use float8_shard::Communicator;

use crate::panics::hide_caught_panics;
use crate::pool::use_current_thread;
use crate::{EscapedWriter, Job, RunError, TrainableModel, escaped};

/// Runs a program; its `main` should do nothing else. burn-float8's log messages, and an error with
/// all its causes, are written to the terminal.
pub fn main(run: impl FnOnce() -> Result<()>) -> ExitCode {
    hide_caught_panics();
    // SAFETY: at this point the program has only one thread.
    unsafe { quiet_wayland() };
    let mut logger = env_logger::builder();
    logger.format(|line, record| writeln!(line, "{}", record.args())).parse_default_env().init();
    use_current_thread();
    let result = crate::file_limits_are_errors().context("cannot listen to signals").and_then(|()| run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    if let Some(RunError::Interrupted { signal, .. }) = error.downcast_ref() {
        say(&error.to_string());
        // As in shells: 128 plus the number of the signal.
        return match *signal {
            "SIGTERM" => ExitCode::from(143),
            "SIGHUP" => ExitCode::from(129),
            "SIGINT" => ExitCode::from(130),
            "SIGUSR1" => ExitCode::from(138),
            _ => ExitCode::FAILURE,
        };
    }
    // Only output is written without naming a file.
    let is_log = error.chain().next().is_some_and(|error| error.is::<std::io::Error>());
    let error = if is_log { error.context("cannot write the log") } else { error };
    let mut said = error.to_string();
    say(&format!("error: {said}"));
    for cause in error.chain().skip(1) {
        // Some errors quote their causes.
        let cause_text = cause.to_string();
        if !said.contains(&cause_text) {
            say(&format!("  caused by: {cause_text}"));
            said = cause_text;
        }
    }
    ExitCode::FAILURE
}

/// Prints a line to standard error. Ignores failures: the terminal may be closed.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", escaped(line));
}

/// Runs the job of a command line. If it `trains` and a launcher has started several processes,
/// they run together, and the first rank writes to the terminal. With `nproc`, this process starts
/// this number of ranks, unless it is a rank.
///
/// `run` is [`run`] or a function that calls it: the crate that instantiates it compiles the whole
/// model for every backend.
///
/// # Errors
/// The errors of the job, on every rank if one fails to create it; a missing `mpirun`; several
/// processes of a command that does not train.
pub fn start<A: TrainableModel>(
    trains: bool,
    nproc: Option<NonZero<usize>>,
    job: impl FnOnce(&mut dyn Write) -> Result<Option<Job<A>>>,
    run: fn(&Job<A>, &mut dyn Write) -> Result<()>,
) -> Result<()> {
    if let Some(nproc) = nproc.filter(|_| std::env::var_os("OMPI_COMM_WORLD_RANK").is_none()) {
        return launch(nproc);
    }
    let comm = Communicator::from_env()?;
    if !trains && comm.world_size() > 1 {
        bail!("{} processes were started, but only `train` and `resume` use several: start one", comm.world_size());
    }
    let (mut stdout, mut nowhere) = (std::io::stdout(), std::io::sink());
    // Generated text read by a program is not escaped.
    let is_log = trains || stdout.is_terminal();
    let mut log = EscapedWriter::new(std::io::stdout());
    let out: &mut dyn Write = match (comm.rank(), is_log) {
        (0, true) => &mut log,
        (0, false) => &mut stdout,
        _ => &mut nowhere,
    };
    if comm.world_size() == 1 {
        return job(out)?.map_or(Ok(()), |job| run(&job, out));
    }
    let job = comm.all_ok("the command line", job(out))?;
    let Some(mut job) = job else { return Ok(()) };
    job.start.comm = Some(connected(comm, &job)?);
    run(&job, out)
}

/// Starts `mpirun`, which starts this program with its arguments `nproc` times on this machine, and
/// ends with the job's exit code.
#[cfg(all(unix, feature = "mpi"))]
fn launch(nproc: NonZero<usize>) -> Result<()> {
    use std::os::unix::process::CommandExt;

    const LAUNCHER: &str = "cannot start mpirun (apt-get install openmpi-bin)";

    let program = std::env::current_exe().context(LAUNCHER)?;
    let mut mpirun = std::process::Command::new("mpirun");
    mpirun.args(["-n", &nproc.to_string()]).arg(program).args(std::env::args_os().skip(1));
    // Open MPI refuses more ranks than cores without this. Other MPIs ignore the variable.
    const OVERSUBSCRIBE: &str = "OMPI_MCA_rmaps_base_oversubscribe";
    if std::env::var_os(OVERSUBSCRIBE).is_none() {
        mpirun.env(OVERSUBSCRIBE, "1");
    }
    // Ctrl-C of the terminal reaches this process only.
    mpirun.process_group(0).stdin(std::process::Stdio::null());
    std::process::exit(crate::signals::wait_for_ranks(&mut mpirun).context(LAUNCHER)?)
}

#[cfg(not(all(unix, feature = "mpi")))]
fn launch(_: NonZero<usize>) -> Result<()> {
    Err(feature_off("--nproc-per-node", "mpi"))
}

/// Error of a backend that was not compiled in.
#[allow(dead_code)]
fn feature_off(device: &str, feature: &str) -> Error {
    anyhow!("this build has no {device} support: enable the `{feature}` feature")
}

/// Connects the ranks by NCCL if they use CUDA devices.
#[cfg(feature = "nccl")]
fn connected(comm: Communicator, job: &Job<impl TrainableModel>) -> Result<Communicator> {
    let selected = comm.all_ok("looking for the device", select(job.device()))?;
    let is_cuda = selected == SelectedDevice::Cuda;
    comm.agree("whether the device is CUDA's", if is_cuda { "yes" } else { "no" })?;
    Ok(if is_cuda { comm.with_nccl(None)? } else { comm })
}

#[cfg(not(feature = "nccl"))]
fn connected(comm: Communicator, _: &Job<impl TrainableModel>) -> Result<Communicator> {
    Ok(comm)
}

/// CUDA device connected by NCCL, with the rank's index on its machine; otherwise the first.
#[cfg(feature = "cuda")]
fn cuda_device(job: &Job<impl TrainableModel>) -> burn::backend::cuda::CudaDevice {
    let comm = job.start.comm.as_ref().filter(|comm| comm.has_nccl());
    comm.map_or_else(Default::default, |comm| burn::backend::cuda::CudaDevice::new(comm.local_rank()))
}

/// Runs a job on its device, and writes the log to `out`.
///
/// # Errors
/// The errors of the job.
pub fn run<A: TrainableModel>(job: &Job<A>, out: &mut dyn Write) -> Result<()> {
    let selected = select(job.device())?;
    match selected {
        SelectedDevice::Cpu => on_cpu(job, &selected, out),
        SelectedDevice::Wgpu(_) => on_wgpu(job, &selected, out),
        SelectedDevice::Cuda => on_cuda(job, &selected, out),
    }
}

macro_rules! backend {
    ($function:ident, $backend:ident, $device:literal, $feature:literal, $place:expr) => {
        /// Runs a job on this rank's device of this backend, which is `selected`, and writes the
        /// log to `out`.
        ///
        /// # Errors
        /// The errors of the job; a backend that was not compiled in.
        #[cfg(feature = $feature)]
        pub fn $function(job: &Job<impl TrainableModel>, selected: &SelectedDevice, out: &mut dyn Write) -> Result<()> {
            type Decorated = burn_float8::Float8<burn::backend::Autodiff<burn::backend::$backend>>;
            job.run::<Decorated>(selected, &$place(job), out)
        }

        /// Returns an error: the backend was not compiled in.
        ///
        /// # Errors
        /// Always.
        #[cfg(not(feature = $feature))]
        pub fn $function(_: &Job<impl TrainableModel>, _: &SelectedDevice, _: &mut dyn Write) -> Result<()> {
            Err(feature_off($device, $feature))
        }
    };
}

backend!(on_cpu, Flex, "cpu", "flex", |_| Default::default());
backend!(on_wgpu, Wgpu, "wgpu", "wgpu", |_| Default::default());
backend!(on_cuda, Cuda, "cuda", "cuda", cuda_device);
