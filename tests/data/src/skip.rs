//! Skipped tests: each is printed at once, and all again at the end of `cargo test`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

/// Requirement of tests on wgpu.
pub const VULKAN: &str = "needs an adapter for wgpu, such as Debian's mesa-vulkan-drivers";

/// Requirement of tests of generated CUDA.
pub const CUDA_TOOLS: &str = "needs FLOAT8_CUDA_TOOLS, and assemblers FLOAT8_PTXAS; .ci/run installs the wheels";

/// Prints that a test is skipped, and what it `needs`. The test target `summary` prints it again.
///
/// # Panics
/// In CI, where nothing may be missing.
pub fn skip(needs: &str) {
    assert!(std::env::var_os("CI").is_none(), "CI skips no test: {needs}");
    skip_optional(needs);
}

/// The same for tests that CI may skip.
pub fn skip_optional(needs: &str) {
    let thread = std::thread::current();
    let line = format!("skipped {}: {needs}\n", thread.name().unwrap_or("a test"));
    // Not `println!`: the harness captures it while a test passes.
    std::io::stdout().write_all(line.as_bytes()).expect("standard output is open");
    if let Some(file) = file() {
        let file = OpenOptions::new().create(true).append(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a writable folder for temporary files");
    }
}

/// Lines of [`skip`] since this command of cargo began, sorted; each once.
pub fn take_skipped() -> Vec<String> {
    let Some(file) = file() else { return vec![] };
    let text = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(file);
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    lines.sort();
    lines.dedup();
    lines
}

/// File of the process that started this one, which is cargo.
fn file() -> Option<PathBuf> {
    #[cfg(unix)]
    return Some(std::env::temp_dir().join(format!("float8-skipped-{}", std::os::unix::process::parent_id())));
    #[cfg(not(unix))]
    None
}
