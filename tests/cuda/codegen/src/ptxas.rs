//! Assemblers of CUDA toolkits. A driver contains the assembler of its version and assembles
//! NVRTC's PTX when it loads a program.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Version of CUDA or of PTX.
pub type Version = (u32, u32);

/// Output of an assembler.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// A cubin.
    pub code: Vec<u8>,
    /// Warnings of lost performance, such as serialized `wgmma`.
    pub lost: Vec<String>,
}

/// A `ptxas`.
#[derive(Clone, Debug)]
pub struct Ptxas {
    path: PathBuf,
    /// Version of its toolkit.
    pub release: Version,
}

impl fmt::Display for Ptxas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.release;
        write!(f, "ptxas {major}.{minor}")
    }
}

impl Ptxas {
    /// # Errors
    /// It does not run, or does not report its release.
    pub fn new(path: &Path) -> Result<Self, String> {
        let output = Command::new(path).arg("--version").output();
        let output = output.map_err(|error| format!("{}: {error}", path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // "Cuda compilation tools, release 13.0, V13.0.88"
        let release = text.split("release ").nth(1).and_then(|rest| version(rest.split(',').next()?));
        let release = release.ok_or_else(|| format!("{}: no release in {text:?}", path.display()))?;
        Ok(Self { path: path.into(), release })
    }

    /// Newest supported PTX version, by the release notes of the PTX ISA.
    const fn isa(&self) -> Version {
        match self.release {
            (12, minor) if minor <= 5 => (8, minor),
            // 12.6 has the PTX version of 12.5; from then on PTX is one minor version behind.
            (12, minor) => (8, minor - 1),
            (major, minor) => (major - 4, minor),
        }
    }

    /// Assembles `ptx` to machine code for `arch`, such as `sm_90a`. A newer PTX version is lowered
    /// to the newest supported one, so `ptx` must not use newer features. Writes files to `folder`.
    ///
    /// # Errors
    /// The assembler's message.
    pub fn assemble(&self, ptx: &str, arch: &str, folder: &Path) -> Result<Assembled, String> {
        let [source, target] = ["kernel.ptx", "kernel.cubin"].map(|name| folder.join(name));
        let io = |error: std::io::Error| format!("{}: {error}", folder.display());
        std::fs::write(&source, with_isa(ptx, self.isa())?).map_err(io)?;
        let output = Command::new(&self.path).arg("-arch").arg(arch).arg("-o").arg(&target).arg(&source).output();
        let output = output.map_err(|error| format!("{}: {error}", self.path.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(said.into_owned());
        }
        let lost = said.lines().filter(|line| line.contains("Performance Loss")).map(String::from).collect();
        Ok(Assembled { code: std::fs::read(&target).map_err(io)?, lost })
    }
}

/// Parses a version: 13.0 of "13.0".
fn version(text: &str) -> Option<Version> {
    let (major, minor) = text.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Lowers the `.version` of `ptx` to at most `most`.
fn with_isa(ptx: &str, most: Version) -> Result<String, String> {
    let line = ptx.lines().find(|line| line.starts_with(".version ")).ok_or("PTX without a .version")?;
    let is = line.strip_prefix(".version ").and_then(version).ok_or_else(|| format!("no version in {line:?}"))?;
    let (major, minor) = is.min(most);
    Ok(ptx.replacen(line, &format!(".version {major}.{minor}"), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_as_old_as_its_assembler() {
        let ptx = "//\n.version 9.0\n.target sm_90a\n";
        assert_eq!(with_isa(ptx, (8, 7)).as_deref(), Ok("//\n.version 8.7\n.target sm_90a\n"));
        assert_eq!(with_isa(ptx, (9, 5)).as_deref(), Ok(ptx));
        assert!(with_isa("// nothing\n", (9, 5)).is_err());
        let isa = |release| Ptxas { path: PathBuf::new(), release }.isa();
        assert_eq!([(12, 4), (12, 8), (12, 9), (13, 0), (13, 5)].map(isa), [(8, 4), (8, 7), (8, 8), (9, 0), (9, 5)]);
    }
}
