//! Bounds the compile time of the first run on a GPU by the number of distinct kernels with tensor
//! maps in all checks.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use checks::{Size, visit};
use codegen::device::{GenerateCuda, Generated, OfflineDevice, on_each, take, unread};
use cubecl_core::Runtime;

/// Bounds on the number of kernels for an architecture. NVRTC and the assembler take about a second
/// per kernel, shared by up to eight workers of `float8-gpu check`: 75 seconds of the first run.
/// Fewer kernels than the minimum mean that checks were lost.
const LEAST: usize = 100;
const MOST: usize = 600;

/// Contents of operands, which do not affect the kernel.
const CODES: [&str; 8] = ["random", "exact", "zeros", "nan-code", "inf-code", "nan-scale", "each-left", "each-right"];

/// Larger matrices are skipped: they take minutes to create, and most of their kernels also occur
/// with smaller ones.
const MOST_ELEMENTS: usize = 1 << 23;

/// Elements of the largest of three matrices, if `word` is `MxNxK`; else 0.
fn largest_matrix(word: &str) -> usize {
    let sizes: Option<Vec<usize>> = word.split('x').map(|size| size.parse().ok()).collect();
    match sizes.as_deref() {
        Some(&[m, n, k]) => (m * n).max(m * k).max(n * k),
        _ => 0,
    }
}

/// Launches the kernels of these checks on a device. Their results are ignored.
fn launch(sm: u16, kernels: &[&str]) {
    let client = GenerateCuda::client(&OfflineDevice::new(sm));
    let mut seen = BTreeSet::new();
    visit(&client, Size::Full, &mut |case| {
        let mut words: Vec<_> = case.name.split(' ').map(String::from).collect();
        let wanted = kernels.contains(&words[0].as_str()) && !words.iter().any(|word| word == "emulated");
        words.retain(|word| !CODES.contains(&word.as_str()));
        let is_large = words.iter().any(|word| largest_matrix(word) > MOST_ELEMENTS);
        if wanted && !is_large && seen.insert(words) {
            let _ = case.run();
        }
    });
}

/// Distinct kernels with tensor maps in all checks, by architecture.
fn kernels<const N: usize>(architectures: [u16; N]) -> BTreeMap<u32, Vec<Generated>> {
    {
        let _unread = unread();
        on_each(architectures, |sm| launch(sm, &["scaled_gemm", "grouped_gemm"]));
    }
    // These read their reference before they launch the other kernels.
    on_each(architectures, |sm| launch(sm, &["repeated_gemm"]));
    let with_maps = take().into_iter().filter(|kernel| kernel.source.contains("CUtensorMap"));
    let distinct: BTreeMap<_, _> = with_maps.map(|kernel| ((kernel.sm, kernel.key()), kernel)).collect();
    let mut kernels = BTreeMap::<_, Vec<_>>::new();
    distinct.into_values().for_each(|kernel| kernels.entry(kernel.sm).or_default().push(kernel));
    kernels
}

#[test]
fn kernels_compile_in_time() {
    for (sm, kernels) in kernels([90, 100]) {
        let sum = format!("sm_{sm}a: {} kernels with tensor maps", kernels.len());
        writeln!(std::io::stdout(), "{sum}").expect("standard output is open");
        assert!((LEAST..=MOST).contains(&kernels.len()), "{sum}, not {LEAST} to {MOST}");
    }
}
