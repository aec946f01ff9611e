//! Generates every kernel variant for every architecture and checks the machine code, without a
//! GPU.
//!
//! Compiles one variant of each entry point. Of an architecture's specific kernels it compiles
//! every seventh variant, or with `FLOAT8_VARIANTS=all` every one. The specific kernels are all
//! kernels on sm_90a, a GEMM on each of sm_80, 89, 100 and 120, and attention on sm_80 and 120.
//!
//! `FLOAT8_CUDA_TOOLS` names the folder of a CUDA toolkit, or `nvidia/cu13` of the PyPI wheels
//! nvidia-cuda-nvrtc, -runtime, -cccl, -crt, -cuobjdump and -nvdisasm. Without it the CUDA is
//! generated but not compiled; in CI that is a failure.

#[path = "codegen/assemblers.rs"]
mod assemblers;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use codegen::device::Generated;
use codegen::expected::{check, family, is_native};
use codegen::nvrtc::Nvrtc;
use codegen::parallel::on_all_cores;
use codegen::sass::Sass;
use codegen::variants::{all_are_asked_for, generate};

/// Compute capabilities, with NVRTC's names that include architecture-specific features.
const ARCHITECTURES: [(u16, &str); 5] =
    [(80, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100a"), (120, "sm_120a")];

/// Kernels that load scales of two and of four blocks at once, with their minimum numbers of
/// variants. There is one per tile and each of two pairs of granularities.
const WIDE_SCALES: [(u16, &str, usize); 2] = [(90, "gemm_hopper", 6), (100, "gemm_blackwell", 4)];

/// Joint operations of two blocks in a cluster, by architecture, with their minimum numbers of
/// variants. There is one per tile and output, more than exist without groups.
const CLUSTERS: [(u16, &str, usize); 3] = [
    (90, "complete_tx::bytes.multicast::cluster", 120),
    (100, "tcgen05.mma.cta_group::2.kind::f8f6f4", 36),
    (100, "tcgen05.mma.cta_group::2.kind::mxf8f6f4", 30),
];

/// Selects the first kernel of each entry point, one for each width of loads and output type. Of
/// kernels that only this architecture has, also selects every `step`-th.
fn selected(kernels: &[Generated], step: usize) -> Vec<Generated> {
    let (mut names, mut count) = (BTreeSet::new(), 0_usize);
    let keep = |kernel: &&Generated| {
        let is_new = names.insert(kernel.name.clone());
        let is_own = kernel.sm == 90 || is_native(kernel);
        let is_sampled = is_own && count.is_multiple_of(step);
        count += usize::from(is_own);
        is_sampled || is_new
    };
    kernels.iter().filter(keep).cloned().collect()
}

/// Summary of one kernel's variants on one architecture.
#[derive(Default)]
struct Summary {
    variants: usize,
    registers: usize,
    local: usize,
    shared: usize,
    occupancy: Option<usize>,
}

/// Prints a line even if the test passes: the harness captures only `println!`.
macro_rules! row {
    ($($field:tt)*) => { writeln!(std::io::stdout(), $($field)*).expect("standard output is open") };
}

fn tools() -> Option<PathBuf> {
    let tools = std::env::var_os("FLOAT8_CUDA_TOOLS").map(PathBuf::from);
    if tools.is_none() {
        test_data::skip(test_data::CUDA_TOOLS);
    }
    tools
}

/// Number of kernels that are disassembled together.
const BATCH: usize = 16;

/// Checks all variants for one architecture on all cores. Returns the errors, and a summary by
/// kernel.
fn check_all(nvrtc: &Nvrtc, kernels: &[Generated], arch: &str) -> (Vec<String>, BTreeMap<String, Summary>) {
    let (errors, summaries) = (Mutex::new(vec![]), Mutex::new(BTreeMap::new()));
    let fail = |kernel: &Generated, error| errors.lock().unwrap().push(format!("{} for {arch}: {error}", kernel.name));
    let batches: Vec<_> = kernels.chunks(BATCH).collect();
    on_all_cores(&batches, |batch| {
        let folder = tempfile::tempdir().expect("a folder for temporary files");
        let (mut compiled, mut cubins) = (vec![], vec![]);
        for kernel in *batch {
            match nvrtc.compile(&kernel.source, arch) {
                Ok(cubin) => {
                    compiled.push(kernel);
                    cubins.push(cubin);
                }
                Err(error) => fail(kernel, error),
            }
        }
        let code = match Sass::of(nvrtc.root(), arch, &cubins, &folder.path().join("code")) {
            Ok(code) => code,
            Err(error) => {
                return compiled.into_iter().for_each(|kernel| fail(kernel, error.clone()));
            }
        };
        for (kernel, sass) in compiled.into_iter().zip(code) {
            if let Err(error) = check(kernel, &sass) {
                fail(kernel, error);
                continue;
            }
            let fits = sass.occupancy(kernel.sm, kernel.threads(), kernel.dynamic_shared);
            let mut summaries = summaries.lock().unwrap();
            let summary: &mut Summary = summaries.entry(family(&kernel.name).to_string()).or_default();
            summary.variants += 1;
            summary.registers = summary.registers.max(sass.registers);
            summary.local = summary.local.max(sass.local);
            summary.shared = summary.shared.max(sass.shared + kernel.dynamic_shared);
            summary.occupancy = Some(summary.occupancy.map_or(fits, |least| least.min(fits)));
        }
    });
    (errors.into_inner().unwrap(), summaries.into_inner().unwrap())
}

#[test]
fn every_kernel_compiles_and_fits() {
    let nvrtc = tools().map(|root| Nvrtc::load(&root).unwrap_or_else(|error| panic!("{error}")));
    let step = if all_are_asked_for() { 1 } else { 7 };
    let (mut failed, mut keys) = (vec![], BTreeMap::new());
    row!(
        "{:8}  {:16}  {:>8}  {:>9}  {:>11}  {:>12}  {:>9}",
        "arch",
        "kernel",
        "variants",
        "registers",
        "local bytes",
        "shared bytes",
        "blocks/SM"
    );
    for (sm, arch) in ARCHITECTURES {
        let kernels = generate(sm);
        assert!(kernels.len() > 300, "only {} kernels for {arch}: has a launch been lost?", kernels.len());
        if let Some((name, least)) =
            WIDE_SCALES.iter().find_map(|(of, name, least)| (*of == sm).then_some((name, least)))
        {
            for load in ["ld.global.v2.b32", "ld.global.v4.b32"] {
                // Into floats.
                let is_wide = |line: &str| line.contains(load) && line.contains("=f");
                let wide =
                    kernels.iter().filter(|kernel| family(&kernel.name) == *name && kernel.source.lines().any(is_wide));
                assert!(wide.count() >= *least, "scales of blocks do not come by {load} in {name}");
            }
        }
        for (_, shared, least) in CLUSTERS.into_iter().filter(|(of, ..)| *of == sm) {
            let count = kernels.iter().filter(|kernel| kernel.source.contains(shared)).count();
            assert!(count >= least, "{count} of {shared}");
        }
        // A copy of metadata to the device stalls the stream before the launch.
        let copying = kernels.iter().find(|kernel| kernel.copies_shapes);
        assert!(copying.is_none(), "shapes are copied to the device for {}", copying.map_or("", |kernel| &kernel.name));
        // A home directory's cache may contain kernels of several architectures.
        for Generated { name, cache_key, .. } in &*kernels {
            let other = keys.insert(*cache_key, sm).filter(|other| *other != sm);
            assert!(
                other.is_none(),
                "{name} for sm_{sm} has the key that a cache knows one for sm_{} by",
                other.unwrap_or(sm)
            );
        }
        let Some(nvrtc) = &nvrtc else { continue };
        let kernels = selected(&kernels, step);
        let (errors, summaries) = check_all(nvrtc, &kernels, arch);
        for (family, Summary { variants, registers, local, shared, occupancy }) in summaries {
            let blocks = occupancy.expect("a summary has variants");
            row!("{arch:8}  {family:16}  {variants:>8}  {registers:>9}  {local:>11}  {shared:>12}  {blocks:>9}");
        }
        failed.extend(errors);
    }
    assert!(failed.is_empty(), "{} kernels failed:\n{}", failed.len(), failed.join("\n"));
}
