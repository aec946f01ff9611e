//! Skipped tests: each is printed at once, and all again at the end of `cargo test`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

/// Requirement of tests on wgpu.
pub const VULKAN: &str = "an adapter for wgpu, such as Debian's mesa-vulkan-drivers";

/// Requirement of tests of generated CUDA.
pub const CUDA_TOOLS: &str = "FLOAT8_CUDA_TOOLS and FLOAT8_PTXAS, whose wheels .ci/run installs";

/// Prints that a test is skipped, and what it `needs`. The test target `summary` prints it again.
///
/// # Panics
/// In CI, where nothing may be missing.
pub fn skip(needs: &str) {
    assert!(std::env::var_os("CI").is_none(), "CI skips no test: it needs {needs}");
    skip_optional(needs);
}

/// The same for tests that CI may skip.
pub fn skip_optional(needs: &str) {
    let thread = std::thread::current();
    let line = format!("skipped {}: needs {needs}\n", thread.name().unwrap_or("a test"));
    // Not `println!`: the harness captures it while a test passes.
    std::io::stdout().write_all(line.as_bytes()).expect("standard output is open");
    if let Some(file) = file() {
        let file = OpenOptions::new().create(true).append(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a writable folder for temporary files");
    }
}

/// Requirements of skipped tests since this command of cargo began, and how many tests each has.
pub fn take_skipped() -> BTreeMap<String, usize> {
    let Some(file) = file() else { return BTreeMap::new() };
    let text = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(file);
    let mut tests = BTreeMap::new();
    for (_, needs) in text.lines().collect::<BTreeSet<_>>().iter().filter_map(|line| line.split_once(": needs ")) {
        *tests.entry(needs.into()).or_default() += 1;
    }
    tests
}

/// File of the process that started this one, which is cargo.
fn file() -> Option<PathBuf> {
    #[cfg(unix)]
    return Some(std::env::temp_dir().join(format!("float8-skipped-{}", std::os::unix::process::parent_id())));
    #[cfg(not(unix))]
    None
}
