//! Hashes the crate's sources into `FLOAT8_KERNELS_SOURCE`, part of every kernel's key.

use std::fs;
use std::path::{Path, PathBuf};

/// All files below `folder`, in a fixed order.
fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    for entry in entries {
        if entry.is_dir() { files(&entry, into) } else { into.push(entry) }
    }
}

fn main() {
    println!("cargo::rerun-if-changed=src");
    let mut paths = vec![];
    files(Path::new("src"), &mut paths);
    // 64-bit FNV-1a: the same on every machine and with every compiler.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in paths.iter().flat_map(|path| fs::read(path).expect("a file")) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    println!("cargo::rustc-env=FLOAT8_KERNELS_SOURCE={hash:016x}");
}
