//! Time limit and compare mode of collectives.

use std::time::Duration;

use crate::error::CommError;
use crate::launch::Lookup;

/// Time limit and compare mode of collectives. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Limit of a collective, after which every rank that waits in it returns an error. Default:
    /// 300 s.
    ///
    /// It also limits how long the first rank that drops its communicator waits for the last. So it
    /// must exceed the longest local step of a rank, such as writing a checkpoint. The environment
    /// variable `FLOAT8_COMM_TIMEOUT`, in seconds, overrides it.
    pub timeout: Duration,
    /// Compares each NCCL collective between ranks before it starts. The first difference is an
    /// error on all ranks. Collectives on host memory are always compared.
    ///
    /// Use it to find the layer at which ranks diverge: the host then waits for each collective.
    /// The environment variable `FLOAT8_COMM_COMPARE`, 0 or 1, overrides it.
    pub compare: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(300), compare: false }
    }
}

impl Options {
    /// Applies the environment variables.
    pub(crate) fn read(self, lookup: Lookup) -> Result<Self, CommError> {
        const COMPARE: &str = "FLOAT8_COMM_COMPARE";
        const TIMEOUT: &str = "FLOAT8_COMM_TIMEOUT";
        let timeout = match lookup(TIMEOUT).filter(|value| !value.is_empty()) {
            None => self.timeout,
            Some(value) => match value.parse() {
                Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
                _ => return Err(CommError::Variable { variable: TIMEOUT, value, expected: "seconds, 1 or more" }),
            },
        };
        let compare = match lookup(COMPARE).as_deref() {
            None | Some("") => self.compare,
            Some("0") => false,
            Some("1") => true,
            Some(other) => {
                return Err(CommError::Variable { variable: COMPARE, value: other.into(), expected: "0 or 1" });
            }
        };
        if timeout.is_zero() {
            return Err(CommError::NoTime);
        }
        Ok(Self { timeout, compare })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_turns_the_compare_mode_on_and_off() {
        let compare = |name: &str| name == "FLOAT8_COMM_COMPARE";
        let read = |options: Options, value: Option<&str>| {
            options.read(&|name| value.filter(|_| compare(name)).map(str::to_owned))
        };
        let on = Options { compare: true, ..Options::default() };
        assert!(read(Options::default(), Some("1")).unwrap().compare);
        assert!(!read(on, Some("0")).unwrap().compare);
        assert!(read(on, None).unwrap().compare);
        let timeout =
            |value: &str| Options::default().read(&|name| (name == "FLOAT8_COMM_TIMEOUT").then(|| value.into()));
        assert_eq!(timeout("2").unwrap().timeout, Duration::from_secs(2));
        assert_eq!(timeout("").unwrap(), Options::default());
        for value in ["0", "-1", "soon"] {
            let text = timeout(value).unwrap_err().to_string();
            assert!(text.contains(&format!("FLOAT8_COMM_TIMEOUT is {value:?}: expected seconds, 1 or more")), "{text}");
        }
        let no_time = Options { timeout: Duration::ZERO, ..on };
        assert!(matches!(read(no_time, None).unwrap_err(), CommError::NoTime));
        let text = read(on, Some("yes")).unwrap_err().to_string();
        assert!(text.contains("FLOAT8_COMM_COMPARE is \"yes\": expected 0 or 1"), "{text}");
    }
}
