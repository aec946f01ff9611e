//! What the machine code of the GEMMs on tensor cores must hold, besides fitting.

use crate::sass::Sass;

/// Instructions that must be there and instructions that must not, by kernel and architecture as NVRTC names it.
fn rules(family: &str, arch: &str) -> (&'static [&'static str], &'static [&'static str]) {
    const SPILLS: [&str; 2] = ["LDL", "STL"];
    match (family, arch) {
        // FP8 products, fragments by `ldmatrix`, copies by `cp.async`.
        ("gemm_mma", "sm_89") => (&["QMMA", "LDSM", "LDGSTS"], &["QMMA.SF", "HMMA", "LDL", "STL"]),
        // The plain form has half the rate of the block-scaled one.
        ("gemm_mma", "sm_120a") => (&["QMMA.SF", "LDSM", "LDGSTS"], &["QMMA.16832", "HMMA", "LDL", "STL"]),
        ("gemm_half", _) => (&["HMMA", "LDSM", "LDG.E.128"], &["QMMA", "LDL", "STL"]),
        _ => (&[], if family.starts_with("gemm") { &SPILLS } else { &[] }),
    }
}

/// Whether all variants of this kernel are worth compiling for every architecture that has them, because no other has the
/// same code.
pub fn is_native(family: &str) -> bool {
    matches!(family, "gemm_mma" | "gemm_half")
}

/// # Errors
/// What is missing or should not be there.
pub fn check(family: &str, arch: &str, sass: &Sass) -> Result<(), String> {
    let (needed, barred) = rules(family, arch);
    let missing: Vec<_> = needed.iter().filter(|opcode| sass.count(opcode) == 0).collect();
    let found: Vec<_> = barred.iter().filter(|opcode| sass.count(opcode) > 0).collect();
    if missing.is_empty() && found.is_empty() {
        return Ok(());
    }
    Err(format!("lacks {missing:?}, has {found:?}: {:?}", sass.opcodes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sass(opcodes: &[&str]) -> Sass {
        Sass { opcodes: opcodes.iter().map(|name| (name.to_string(), 1)).collect(), ..Sass::default() }
    }

    #[test]
    fn the_form_of_the_products_is_the_architectures() {
        let plain = sass(&["QMMA.16832.F32.E4M3.E4M3", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.LTC128B.128"]);
        let scaled = sass(&["QMMA.SF.16832.F32.E4M3.E4M3.E8", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.LTC128B.128"]);
        assert!(check("gemm_mma", "sm_89", &plain).is_ok() && check("gemm_mma", "sm_120a", &scaled).is_ok());
        assert!(check("gemm_mma", "sm_89", &scaled).is_err() && check("gemm_mma", "sm_120a", &plain).is_err());
    }

    #[test]
    fn spills_are_found() {
        let opcodes = ["HMMA.16816.F32", "LDSM.16.M88.4", "LDG.E.128.CONSTANT"];
        assert!(check("gemm_half", "sm_80", &sass(&opcodes)).is_ok());
        let spilled: Vec<_> = opcodes.into_iter().chain(["STL.64"]).collect();
        assert!(check("gemm_half", "sm_80", &sass(&spilled)).is_err());
    }
}
