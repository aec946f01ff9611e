//! What a first run on a GPU has to compile fits its minutes: the distinct kernels with tensor maps of all checks, times what
//! NVRTC and the assembler take for one.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use checks::{Size, visit};
use codegen::device::{GenerateCuda, Generated, OfflineDevice, take, unreadable};
use codegen::nvrtc::Nvrtc;
use cubecl_core::Runtime;

/// What all kernels of a run may take one worker; `float8-gpu check` has up to eight.
const BUDGET: Duration = Duration::from_secs(600);

/// Kernels whose compilation is timed.
const SAMPLE: usize = 8;

/// Kernels with tensor maps that the checks of `size` launch, by their source. What is read is of no interest.
fn kernels(sm: u16, size: Size) -> BTreeMap<String, Generated> {
    let client = GenerateCuda::client(&OfflineDevice::new(sm));
    let mut kernels = BTreeMap::new();
    take();
    visit(&client, size, &mut |case| {
        let kernel = case.name.split(' ').next().expect("a name has a first word").to_string();
        if !["scaled_gemm", "grouped_gemm", "repeated_gemm"].contains(&kernel.as_str())
            || case.name.contains("emulated")
        {
            return;
        }
        // A repeated GEMM reads what it compares with before it launches the others.
        let unreadable = (kernel != "repeated_gemm").then(unreadable);
        let _ = case.run();
        drop(unreadable);
        let with_maps = take().into_iter().filter(|kernel| kernel.source.contains("CUtensorMap"));
        kernels.extend(with_maps.map(|kernel| (kernel.key(), kernel)));
    });
    kernels
}

#[test]
fn kernels_compile_in_time() {
    let Some(root) = std::env::var_os("FLOAT8_CUDA_TOOLS") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set FLOAT8_CUDA_TOOLS");
        // Not `println!`, which the harness holds back while a test passes.
        writeln!(std::io::stdout(), "skipped: FLOAT8_CUDA_TOOLS names no toolkit").expect("standard output is open");
        return;
    };
    let nvrtc = Nvrtc::load(Path::new(&root)).unwrap_or_else(|error| panic!("{error}"));
    for (sm, arch) in [(90, "sm_90a"), (100, "sm_100a")] {
        let kernels = kernels(sm, Size::Full);
        assert!(kernels.len() >= SAMPLE, "{} kernels with tensor maps for {arch}", kernels.len());
        let sample: Vec<_> = kernels.values().step_by(kernels.len() / SAMPLE).collect();
        let start = Instant::now();
        for kernel in &sample {
            nvrtc.compile(&kernel.source, arch).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
        }
        let each = start.elapsed() / sample.len() as u32;
        let all = each * kernels.len() as u32;
        writeln!(std::io::stdout(), "{arch}: {} kernels with tensor maps, {each:.2?} each, {all:.0?}", kernels.len())
            .expect("standard output is open");
        assert!(all <= BUDGET, "{arch}: {} kernels of {each:.2?} take {all:.0?}, not {BUDGET:?}", kernels.len());
    }
}
