//! World size and time limit according to environment variables.

use std::time::Duration;

use crate::error::ShardError;

/// Reads an environment variable. Tests replace it.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Value of an environment variable. One that is not UTF-8 is not a number either, and the error
/// for numbers reports it.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Number of ranks that a launcher says it started. MPI confirms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub world_size: usize,
    /// Name of the variable.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    pub variable: &'static str,
}

/// mpirun of Open MPI, mpirun of MPICH and Intel MPI, srun with PMIx.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

impl Launch {
    /// None if no launcher started this process, which is then a world of one. Processes of torchrun
    /// would each train alone.
    pub(super) fn read(lookup: Lookup) -> Result<Option<Self>, ShardError> {
        for variable in SIZES {
            // Every Slurm step sets its variables, also without MPI.
            let is_set = !variable.starts_with("SLURM") || lookup("PMIX_RANK").is_some();
            let Some(value) = lookup(variable).filter(|_| is_set) else { continue };
            return match value.trim().parse() {
                Ok(world_size) if world_size > 0 => Ok(Some(Self { world_size, variable })),
                _ => Err(invalid(variable, &value, "a number of ranks")),
            };
        }
        match lookup("TORCHELASTIC_RUN_ID") {
            Some(_) => Err(ShardError::Launcher("torchrun started this process: start ranks by mpirun or srun".into())),
            None => Ok(None),
        }
    }
}

/// Time limit of a collective: `FLOAT8_COMM_TIMEOUT` in seconds, else 300 s.
#[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
pub(super) fn timeout(lookup: Lookup) -> Result<Duration, ShardError> {
    const TIMEOUT: &str = "FLOAT8_COMM_TIMEOUT";
    let Some(value) = lookup(TIMEOUT).filter(|value| !value.is_empty()) else { return Ok(Duration::from_secs(300)) };
    let seconds = value.parse().ok().filter(|seconds| *seconds > 0.0);
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    timeout.ok_or_else(|| invalid(TIMEOUT, &value, "seconds, more than 0"))
}

fn invalid(variable: &str, value: &str, expected: &str) -> ShardError {
    ShardError::Launcher(format!("the environment variable {variable} is {value:?}: expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<usize>, String> {
        let launch = Launch::read(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).into()));
        launch.map(|launch| launch.map(|launch| launch.world_size)).map_err(|error| error.to_string())
    }

    #[test]
    fn each_launcher_is_understood() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("SLURM_STEP_NUM_TASKS", "8")]), Ok(None));
        assert_eq!(read(&[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "3")]), Ok(Some(4)));
        assert_eq!(read(&[("PMI_SIZE", "2")]), Ok(Some(2)));
        assert_eq!(read(&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "3")]), Ok(Some(3)));
        assert!(read(&[("TORCHELASTIC_RUN_ID", "7")]).unwrap_err().starts_with("torchrun started"));
        for value in ["0", "-1", "two"] {
            let error = read(&[("PMI_SIZE", value)]).unwrap_err();
            assert!(error.contains(&format!("PMI_SIZE is {value:?}")), "{error}");
        }
    }

    #[test]
    fn the_time_limit_is_in_seconds() {
        let of = |value: &str| timeout(&|_| Some(value.into()));
        assert_eq!(timeout(&|_| None).unwrap(), Duration::from_secs(300));
        assert_eq!(of("").unwrap(), Duration::from_secs(300));
        assert_eq!(of("1.5").unwrap(), Duration::from_millis(1500));
        for value in ["0", "-1", "soon", "1e30"] {
            let text = of(value).unwrap_err().to_string();
            assert!(text.contains(&format!("FLOAT8_COMM_TIMEOUT is {value:?}: expected seconds")), "{text}");
        }
    }
}
