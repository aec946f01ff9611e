//! Rank of this process according to its launcher's environment variables.

use crate::error::CommError;

/// Reads an environment variable. Tests replace it.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Program that started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// mpirun or another launcher of MPI.
    Mpi,
    /// torchrun, which starts no MPI.
    Torchrun,
}

/// Variables of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub launcher: Launcher,
    pub rank: usize,
    pub world_size: usize,
    /// None if the launcher does not set it.
    pub local_rank: Option<usize>,
    /// Name of the variable with the world size.
    pub size_variable: &'static str,
    rank_variable: &'static str,
}

struct Variables {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
}

/// Open MPI's mpirun; mpirun of MPICH and Intel MPI; srun with PMIx; torchrun.
const KNOWN: [Variables; 4] = [
    Variables {
        launcher: Launcher::Mpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Variables { launcher: Launcher::Mpi, rank: "PMI_RANK", world_size: "PMI_SIZE", local_rank: "MPI_LOCALRANKID" },
    Variables {
        launcher: Launcher::Mpi,
        rank: "PMIX_RANK",
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
    },
    Variables { launcher: Launcher::Torchrun, rank: "RANK", world_size: "WORLD_SIZE", local_rank: "LOCAL_RANK" },
];

impl Launcher {
    #[cfg_attr(all(feature = "mpi", feature = "nccl"), allow(dead_code))]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mpi => "mpirun",
            Self::Torchrun => "torchrun",
        }
    }
}

impl Launch {
    /// None if no launcher started this process, which is then a world of one.
    pub(crate) fn read(lookup: Lookup) -> Result<Option<Self>, CommError> {
        let mut found: Option<Self> = None;
        for variables in &KNOWN {
            // Open MPI's mpirun also sets PMIX_RANK, and every Slurm step sets the step variables.
            if variables.rank == "PMIX_RANK" && (found.is_some() || lookup(variables.rank).is_none()) {
                continue;
            }
            let Some(next) = Self::of(variables, lookup)? else { continue };
            match &found {
                None => found = Some(next),
                Some(first) => first.agrees_with(&next)?,
            }
        }
        Ok(found)
    }

    fn of(variables: &Variables, lookup: Lookup) -> Result<Option<Self>, CommError> {
        let missing = |present, value, missing| Err(CommError::MissingVariable { present, value, missing });
        let (rank, world_size) = match (lookup(variables.rank), lookup(variables.world_size)) {
            (None, None) => return Ok(None),
            (Some(value), None) => return missing(variables.rank, value, variables.world_size),
            (None, Some(value)) => return missing(variables.world_size, value, variables.rank),
            (Some(rank), Some(size)) => (number(variables.rank, rank)?, number(variables.world_size, size)?),
        };
        if world_size == 0 {
            let value = world_size.to_string();
            return Err(CommError::Variable { variable: variables.world_size, value, expected: "at least 1" });
        }
        if rank >= world_size {
            let (variable, size_variable) = (variables.rank, variables.world_size);
            return Err(CommError::RankOutOfRange { variable, rank, size_variable, world_size });
        }
        let local_rank = lookup(variables.local_rank).map(|value| number(variables.local_rank, value)).transpose()?;
        let (launcher, size_variable, rank_variable) = (variables.launcher, variables.world_size, variables.rank);
        Ok(Some(Self { launcher, rank, world_size, local_rank, size_variable, rank_variable }))
    }

    fn agrees_with(&self, other: &Self) -> Result<(), CommError> {
        let differ = |first, first_value, second, second_value| {
            Err(CommError::TwoLaunchers { first, first_value, second, second_value })
        };
        if self.world_size != other.world_size {
            return differ(self.size_variable, self.world_size, other.size_variable, other.world_size);
        }
        if self.rank != other.rank {
            return differ(self.rank_variable, self.rank, other.rank_variable, other.rank);
        }
        Ok(())
    }
}

fn number(variable: &'static str, value: String) -> Result<usize, CommError> {
    value.trim().parse().map_err(|_| CommError::Variable { variable, value, expected: "a number from 0" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Launch>, CommError> {
        Launch::read(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into()))
    }

    fn refused(variables: &[(&str, &str)]) -> String {
        read(variables).unwrap_err().to_string()
    }

    #[test]
    fn no_launcher_is_a_world_of_one() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("LOCAL_RANK", "3"), ("SLURM_STEP_NUM_TASKS", "8")]).unwrap(), None);
    }

    #[test]
    fn each_launcher_is_understood() {
        let ranks = |found: Launch| (found.launcher, found.rank, found.world_size, found.local_rank);
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("PMIX_RANK", "3"),
        ];
        assert_eq!(ranks(read(&open_mpi).unwrap().unwrap()), (Launcher::Mpi, 3, 4, Some(1)));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        assert_eq!(ranks(read(&mpich).unwrap().unwrap()), (Launcher::Mpi, 0, 2, None));
        let srun = [("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "1")];
        assert_eq!(ranks(read(&srun).unwrap().unwrap()), (Launcher::Mpi, 1, 2, Some(1)));
        let torchrun = [("RANK", "9"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1")];
        assert_eq!(ranks(read(&torchrun).unwrap().unwrap()), (Launcher::Torchrun, 9, 16, Some(1)));
    }

    #[test]
    fn half_a_world_is_refused_by_name() {
        let text = refused(&[("RANK", "1")]);
        assert!(text.contains("RANK is set (\"1\"), but WORLD_SIZE is not"), "{text}");
        let text = refused(&[("OMPI_COMM_WORLD_SIZE", "4")]);
        assert!(text.contains("OMPI_COMM_WORLD_SIZE is set (\"4\"), but OMPI_COMM_WORLD_RANK is not"), "{text}");
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        let text = refused(&[("RANK", "one"), ("WORLD_SIZE", "2")]);
        assert!(text.contains("RANK is \"one\""), "{text}");
        let text = refused(&[("RANK", "0"), ("WORLD_SIZE", "-2")]);
        assert!(text.contains("WORLD_SIZE is \"-2\""), "{text}");
        let text = refused(&[("RANK", "0"), ("WORLD_SIZE", "0")]);
        assert!(text.contains("WORLD_SIZE is \"0\": expected at least 1"), "{text}");
        let text = refused(&[("RANK", "2"), ("WORLD_SIZE", "2")]);
        assert!(text.contains("RANK says rank 2, but WORLD_SIZE says 2"), "{text}");
        let text = refused(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "x")]);
        assert!(text.contains("LOCAL_RANK is \"x\""), "{text}");
    }

    #[test]
    fn two_launchers_must_agree() {
        let both = |rank, size| read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("RANK", rank), ("WORLD_SIZE", size)]);
        assert_eq!(both("1", "2").unwrap().unwrap().launcher, Launcher::Mpi);
        assert!(matches!(
            both("1", "3").unwrap_err(),
            CommError::TwoLaunchers { first: "PMI_SIZE", first_value: 2, second: "WORLD_SIZE", second_value: 3 }
        ));
        assert!(matches!(
            both("0", "2").unwrap_err(),
            CommError::TwoLaunchers { first: "PMI_RANK", second: "RANK", .. }
        ));
    }
}
