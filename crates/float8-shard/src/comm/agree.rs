//! Agreement of all ranks before they start: equal settings, equal code, no failed rank.

use std::fmt::Display;

use super::communicator::Communicator;
use crate::error::ShardError;

impl Communicator {
    /// Compares `value`, such as the configuration or the code's version, across ranks.
    ///
    /// # Errors
    /// [`ShardError::Disagree`], the same on every rank, unless all values are equal; the engine's
    /// errors.
    pub fn agree(&self, what: &str, value: &str) -> Result<(), ShardError> {
        let all = self.all_gather_bytes(what, value.as_bytes())?;
        let Some((rank, other)) = all.iter().enumerate().find(|(_, other)| **other != all[0]) else { return Ok(()) };
        let [first, other] = [&all[0], other].map(|bytes| String::from_utf8_lossy(bytes));
        let (line, first, other) = first_difference(&first, &other);
        Err(ShardError::Disagree { what: what.into(), rank, line, first, other })
    }

    /// Returns `result` if it is `Ok` on every rank. A local step, such as reading a file, then
    /// fails on all ranks or on none.
    ///
    /// # Errors
    /// [`ShardError::RankFailed`], the same on every rank, if any rank has an error; the engine's
    /// errors.
    pub fn all_ok<T, E: Display>(&self, what: &str, result: Result<T, E>) -> Result<T, ShardError> {
        // The leading byte distinguishes an error without a message from no error.
        let own = result.as_ref().err().map_or_else(Vec::new, |error| format!("!{error}").into_bytes());
        let all = self.all_gather_bytes(what, &own)?;
        let failed = all.iter().position(|message| !message.is_empty());
        let error = |rank: usize| {
            let message = String::from_utf8_lossy(&all[rank][1..]).into_owned();
            ShardError::RankFailed { what: what.into(), rank, message }
        };
        match (failed, result) {
            (None, Ok(value)) => Ok(value),
            (Some(rank), _) => Err(error(rank)),
            (None, Err(_)) => Err(error(self.rank())),
        }
    }
}

/// First line that differs, numbered from 1 if there are several. A missing line counts as empty.
fn first_difference(first: &str, other: &str) -> (Option<usize>, String, String) {
    let (mut a, mut b) = (first.lines(), other.lines());
    for line in 1.. {
        match (a.next(), b.next()) {
            // Only the line endings differ.
            (None, None) => break,
            (x, y) if x == y => {}
            (x, y) => {
                let several = first.lines().nth(1).is_some() || other.lines().nth(1).is_some();
                // Lines with different keys are not two values of one key: one side lacks a line
                // that the other has.
                let is_another_key = x.map(key) != y.map(key);
                let (x, y) = match (x, y) {
                    (Some(x), Some(y)) if is_another_key && a.any(|later| later == y) => (x, ""),
                    (Some(x), Some(y)) if is_another_key && b.any(|later| later == x) => ("", y),
                    (x, y) => (x.unwrap_or_default(), y.unwrap_or_default()),
                };
                return (several.then_some(line), x.into(), y.into());
            }
        }
    }
    (None, first.into(), other.into())
}

/// Key of a line of TOML.
fn key(line: &str) -> &str {
    line.split_once('=').map_or(line, |(key, _)| key.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named() {
        let of = |a, b| first_difference(a, b);
        assert_eq!(of("4", "8"), (None, "4".into(), "8".into()));
        assert_eq!(of("lr = 1\nsteps = 4\n", "lr = 1\nsteps = 8\n"), (Some(2), "steps = 4".into(), "steps = 8".into()));
        assert_eq!(of("a", "a\nb"), (Some(2), String::new(), "b".into()));
        let (more, less) = ("a = 1\nb = 2\nc = 3\n", "a = 1\nc = 3\n");
        assert_eq!(of(more, less), (Some(2), "b = 2".into(), String::new()));
        assert_eq!(of(less, more), (Some(2), String::new(), "b = 2".into()));
        // An equal line in a later section belongs to another key.
        let (first, other) = ("steps = 4\n[lr]\nsteps = 8\n", "steps = 8\n[lr]\nsteps = 8\n");
        assert_eq!(of(first, other), (Some(1), "steps = 4".into(), "steps = 8".into()));
        assert_eq!(of("a\n", "a\r\n"), (None, "a\n".into(), "a\r\n".into()));
    }

    #[test]
    fn a_world_of_one_agrees_and_reports_its_own_error() {
        let comm = Communicator::solo();
        comm.agree("config", "x").unwrap();
        assert_eq!(comm.all_ok::<_, &str>("reading", Ok(3)).unwrap(), 3);
        let error = comm.all_ok::<(), _>("reading the config", Err("")).unwrap_err();
        assert!(matches!(&error, ShardError::RankFailed { rank: 0, message, .. } if message.is_empty()), "{error}");
        let error = comm.all_ok::<(), _>("reading the config", Err("no such file")).unwrap_err();
        assert_eq!(error.to_string(), "reading the config failed on rank 0: no such file");
    }
}
