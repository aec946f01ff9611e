//! Lines of CubeCL's kernel log: `| 12.5µs | CastTiles | f32 | ..`.

/// Kernel and seconds of a launch; `None` for CubeCL's summaries, whose lines begin with a name.
pub(super) fn launch(line: &str) -> Option<(&str, f64)> {
    let (time, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
    // `s` comes last, because every other unit ends with it too.
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let (number, unit) = units.into_iter().find_map(|(name, unit)| Some((time.trim().strip_suffix(name)?, unit)))?;
    let seconds = number.parse::<f64>().ok()? * unit;
    (0.0..1e9).contains(&seconds).then(|| (rest.split(" | ").next().unwrap_or(rest).trim(), seconds))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn launches_are_read_as_they_are_written() {
        for nanos in [0, 1, 999, 1_000, 12_500, 999_999, 1_234_567, 999_999_999, 1_000_000_000, 73_000_000_001] {
            let written = Duration::from_nanos(nanos);
            let line = format!("| {written:<10?} | CastTiles | f32 | Const");
            let (kernel, seconds) = launch(&line).unwrap_or_else(|| panic!("{line}"));
            assert!(kernel == "CastTiles" && (seconds - written.as_secs_f64()).abs() < 1e-12, "{line}");
        }
        assert_eq!(launch("| 2ms        | GemmMma"), Some(("GemmMma", 2e-3)));
        for other in [
            "|⎺⎺⎺⎺⎺⎺| ",
            "| Name                      | Duration | Num Computed | Ratio |",
            "| CastTiles | f32 | Const   | 12.5µs   | 3            | 40 %  |",
            "Executing CastTiles",
            "| -1.5ms     | CastTiles",
            "| 1e400s     | CastTiles",
            "",
        ] {
            assert_eq!(launch(other), None, "{other}");
        }
    }
}
