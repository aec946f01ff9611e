//! Lines of CubeCL's kernel log, `| 12.5µs | CastTiles | f32 | ..`, and kinds of float8-kernels'
//! kernels.

use super::Kind;

/// Kinds of float8-kernels' kernels; the others are [`Kind::Other`].
const KINDS: [(&str, Kind); 17] = [
    ("PartialMaxima", Kind::Amax),
    ("FoldAmax", Kind::Amax),
    ("LineMaxima", Kind::Amax),
    ("FoldLines", Kind::Amax),
    ("CastLinear", Kind::Cast),
    ("CastTiles", Kind::Cast),
    ("CastRows", Kind::Cast),
    ("ScalesToE8m0", Kind::Cast),
    ("TransposeCodes", Kind::Cast),
    ("DequantizeF32", Kind::Cast),
    ("GemmEmulated", Kind::ScaledGemm),
    ("Gemv", Kind::ScaledGemm),
    ("GemmMma", Kind::ScaledGemm),
    ("GemmHalf", Kind::ScaledGemm),
    ("GemmHopper", Kind::ScaledGemm),
    ("GemmBlackwell", Kind::ScaledGemm),
    ("GemmCombine", Kind::ScaledGemm),
];

/// Kind of a kernel. CubeCL names it by its type.
pub(super) fn kind(kernel: &str) -> Kind {
    KINDS.iter().find(|(name, _)| *name == kernel).map_or(Kind::Other, |(_, kind)| *kind)
}

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
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::time::Duration;
    use std::{fs, iter};

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
        assert_eq!(
            ["CastTiles", "GemmMma", "Cast", ""].map(kind),
            [Kind::Cast, Kind::ScaledGemm, Kind::Other, Kind::Other]
        );
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

    /// Types of the kernel functions in a folder of sources: `cast_tiles` is launched as `CastTiles`.
    fn launched(folder: &Path) -> BTreeSet<String> {
        let of_file = |path: &Path| {
            let text = fs::read_to_string(path).unwrap();
            let name = |after: &str| {
                let function = after.split_once("fn ").unwrap().1.split(|c: char| !c.is_alphanumeric() && c != '_');
                let words = function.into_iter().next().unwrap().split('_');
                words
                    .flat_map(|word| word[..1].to_uppercase().chars().chain(word[1..].chars()).collect::<Vec<_>>())
                    .collect()
            };
            text.split("#[cube(launch").skip(1).map(name).collect::<BTreeSet<String>>()
        };
        let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        paths.flat_map(|path| if path.is_dir() { launched(&path) } else { of_file(&path) }).collect()
    }

    #[test]
    fn every_kernel_has_a_kind() {
        let found = launched(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/src"));
        // Fused operations, statistics, and a kernel of tests and benchmarks.
        let others = ["SwigluForward", "SwigluGradients", "RmsNormForward", "RmsNormGradients", "SumRows", "Rotate"];
        let others = others.into_iter().chain(["PartialHealth"]).chain(iter::once("Dequantize"));
        let named = KINDS.iter().map(|(name, _)| *name).chain(others);
        assert_eq!(found, named.map(String::from).collect());
    }
}
