//! Lines of CubeCL's kernel log: `| 12.5µs | CastTiles | f32 | ..`, with the kernel's time and
//! short name first.

use std::time::Duration;

/// A kernel and its duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch<'a> {
    pub(super) kernel: &'a str,
    pub(super) time: Duration,
}

/// Parses the launch in a line; `None` for CubeCL's summaries, whose lines begin with a name.
pub(super) fn launch(line: &str) -> Option<Launch<'_>> {
    let (time, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
    let kernel = rest.split(" | ").next()?.trim();
    Some(Launch { kernel, time: duration(time.trim())? })
}

/// Parses the `Debug` form of a duration.
fn duration(text: &str) -> Option<Duration> {
    // Seconds come last, because every other unit ends with `s` too.
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let (number, unit) = units.into_iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)))?;
    let number: f64 = number.parse().ok()?;
    Duration::try_from_secs_f64(number * unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_they_are_written() {
        for nanos in [0, 1, 999, 1_000, 12_500, 999_999, 1_234_567, 999_999_999, 1_000_000_000, 73_000_000_001] {
            let written = Duration::from_nanos(nanos);
            let line = format!("| {written:<10?} | CastTiles | f32 | Const");
            assert_eq!(launch(&line), Some(Launch { kernel: "CastTiles", time: written }), "{line}");
        }
        let line = format!("| {:<10?} | GemmMma", Duration::from_millis(2));
        assert_eq!(launch(&line).unwrap().kernel, "GemmMma");
    }

    #[test]
    fn lines_of_a_summary_are_no_launches() {
        let lines = [
            "|⎺⎺⎺⎺⎺⎺| ",
            "| Name                      | Duration | Num Computed | Ratio |",
            "| CastTiles | f32 | Const   | 12.5µs   | 3            | 40 %  |",
            "| Total                     | 12.5µs   | 3            | 100 % |",
            "Executing CastTiles",
            "| -1.5ms     | CastTiles",
            "| 1e400s     | CastTiles",
            "",
        ];
        for line in lines {
            assert_eq!(launch(line), None, "{line}");
        }
    }
}
