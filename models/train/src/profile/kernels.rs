//! Kinds of float8-kernels' kernels, by name.

use std::fmt;

use serde::Serialize;

/// Kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Separate amax kernels of casts.
    Amax,
    /// Casts to FP8.
    Cast,
    /// FP8 GEMMs.
    ScaledGemm,
    /// Everything else with a name.
    Other,
    /// Time not covered by any kernel or timed operation.
    Host,
}

impl Kind {
    /// All kinds, in the order of tables.
    pub const ALL: [Self; 5] = [Self::Amax, Self::Cast, Self::ScaledGemm, Self::Other, Self::Host];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Amax => "amax",
            Self::Cast => "cast",
            Self::ScaledGemm => "scaled GEMM",
            Self::Other => "other",
            Self::Host => "host",
        })
    }
}

/// Kernels of float8-kernels, by function name.
#[cfg(any(feature = "wgpu", feature = "cuda", test))]
const KERNELS: [(&str, Kind); 24] = [
    ("partial_maxima", Kind::Amax),
    ("fold_amax", Kind::Amax),
    ("line_maxima", Kind::Amax),
    ("fold_lines", Kind::Amax),
    ("cast_linear", Kind::Cast),
    ("cast_tiles", Kind::Cast),
    ("cast_rows", Kind::Cast),
    ("scales_to_e8m0", Kind::Cast),
    ("transpose_codes", Kind::Cast),
    ("dequantize_f32", Kind::Cast),
    ("gemm_emulated", Kind::ScaledGemm),
    ("gemv", Kind::ScaledGemm),
    ("gemm_mma", Kind::ScaledGemm),
    ("gemm_half", Kind::ScaledGemm),
    ("gemm_hopper", Kind::ScaledGemm),
    ("gemm_blackwell", Kind::ScaledGemm),
    ("gemm_combine", Kind::ScaledGemm),
    // Fused operations.
    ("swiglu_forward", Kind::Other),
    ("swiglu_gradients", Kind::Other),
    ("rms_norm_forward", Kind::Other),
    ("rms_norm_gradients", Kind::Other),
    ("sum_rows", Kind::Other),
    ("rotate", Kind::Other),
    // Statistics.
    ("partial_health", Kind::Other),
];

/// Function name and kind for CubeCL's name of a kernel. An unknown kernel keeps its name.
#[cfg(any(feature = "wgpu", feature = "cuda", test))]
pub(super) fn known(kernel: &str) -> (&str, Kind) {
    // `cast_tiles` is launched as the type `CastTiles`.
    let is_type_of = |function: &str| {
        let words = function.split('_').map(|word| (&word[..1], &word[1..]));
        let mut rest = kernel;
        let mut eats = |part: &str| rest.strip_prefix(part).map(|left| rest = left).is_some();
        words.into_iter().all(|(first, others)| eats(&first.to_uppercase()) && eats(others)) && rest.is_empty()
    };
    KERNELS.into_iter().find(|(function, _)| is_type_of(function)).unwrap_or((kernel, Kind::Other))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn kernels_are_known_by_the_types_that_cubecl_names() {
        assert_eq!(known("CastTiles"), ("cast_tiles", Kind::Cast));
        assert_eq!(known("GemmMma"), ("gemm_mma", Kind::ScaledGemm));
        for other in ["Cast", "CastTilesOf", "MyCastTiles", "cast_tiles", ""] {
            assert_eq!(known(other), (other, Kind::Other));
        }
    }

    /// Names of kernel functions in a folder of sources.
    fn launched(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                launched(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for after in text.split("#[cube(launch").skip(1) {
                let (_, function) = after.split_once("fn ").unwrap();
                found.insert(function.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            }
        }
    }

    #[test]
    fn every_kernel_has_a_kind() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/src");
        let mut found = BTreeSet::new();
        launched(&sources, &mut found);
        // Used only in tests and benchmarks, not in steps.
        assert!(found.remove("dequantize"));
        let named: BTreeSet<_> = KERNELS.iter().map(|(function, _)| function.to_string()).collect();
        assert_eq!(found, named);
        assert_eq!(named.len(), KERNELS.len());
    }
}
