//! The PTX that NVRTC makes of the GEMMs for tensor cores, assembled by several versions of `ptxas`: the machine code of each keeps the
//! same rules.
//!
//! `FLOAT8_PTXAS` names the assemblers, separated by colons. Without it, or without `FLOAT8_CUDA_TOOLS`, the test says that it was
//! skipped; in CI that is a failure.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use codegen::expected::{check, family};
use codegen::nvrtc::Nvrtc;
use codegen::parallel::on_all_cores;
use codegen::ptxas::Ptxas;
use codegen::sass::Sass;
use codegen::variants::generate;
use float8_kernels::trap_stuck_barriers;

/// The kernel for tensor cores of each architecture, and a step: variant 0, `step`, 2 · `step` and so on are assembled, since all of
/// them would take an hour.
const KERNELS: [(u16, &str, &str, usize); 4] = [
    (90, "sm_90a", "gemm_hopper", 13),
    (100, "sm_100a", "gemm_blackwell", 25),
    (89, "sm_89", "gemm_mma", 49),
    (120, "sm_120a", "gemm_mma", 49),
];

/// Products of two blocks: the first variant of each is assembled too.
const PAIRS: [&str; 2] = ["cta_group::2.kind::f8f6f4", "cta_group::2.kind::mxf8f6f4"];

fn tools() -> Option<(PathBuf, Vec<Ptxas>)> {
    let [tools, assemblers] = ["FLOAT8_CUDA_TOOLS", "FLOAT8_PTXAS"].map(std::env::var_os);
    let (Some(tools), Some(assemblers)) = (tools, assemblers) else {
        assert!(std::env::var_os("CI").is_none(), "CI must set FLOAT8_CUDA_TOOLS and FLOAT8_PTXAS");
        writeln!(std::io::stdout(), "skipped: FLOAT8_CUDA_TOOLS and FLOAT8_PTXAS name no CUDA tools")
            .expect("it is open");
        return None;
    };
    let assemblers = std::env::split_paths(&assemblers).map(|path| Ptxas::new(&path).unwrap_or_else(|e| panic!("{e}")));
    Some((tools.into(), assemblers.collect()))
}

/// What is wrong with kernels that trap at stuck barriers: they name themselves and assemble. They keep no rules of speed: the call
/// of a function that fails serializes `wgmma`.
fn traps(nvrtc: &Nvrtc, assemblers: &[Ptxas]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let mut errors = vec![];
    trap_stuck_barriers(true);
    for (sm, arch, name, _) in &KERNELS[..2] {
        let kernel = generate(*sm).into_iter().find(|kernel| family(&kernel.name) == *name).expect("it is generated");
        if !kernel.source.contains(&format!("__assertfail(\"an mbarrier is complete within ten seconds\", \"{name}\""))
        {
            errors.push(format!("{name} does not trap"));
        }
        let assembled = nvrtc.ptx(&kernel.source, arch).and_then(|ptx| {
            assemblers.iter().try_for_each(|assembler| assembler.assemble(&ptx, arch, folder.path()).map(drop))
        });
        errors.extend(assembled.err().map(|error| format!("{name} with traps for {arch}: {error}")));
    }
    trap_stuck_barriers(false);
    errors
}

#[test]
fn the_rules_hold_for_every_assembler() {
    let Some((root, assemblers)) = tools() else { return };
    let nvrtc = Nvrtc::load(&root).unwrap_or_else(|error| panic!("{error}"));
    let mut work = vec![];
    trap_stuck_barriers(false);
    for (sm, arch, wanted, step) in KERNELS {
        let kernels: Vec<_> = generate(sm).into_iter().filter(|kernel| family(&kernel.name) == wanted).collect();
        assert!(kernels.len() >= step, "{} of {wanted} for {arch}", kernels.len());
        let firsts = PAIRS.map(|pair| kernels.iter().position(|kernel| kernel.source.contains(pair)));
        assert!(sm != 100 || firsts.iter().all(Option::is_some), "a product of two blocks is lost");
        let chosen = |i: usize| i.is_multiple_of(step) || firsts.contains(&Some(i));
        let chosen = kernels.into_iter().enumerate().filter(|(i, _)| chosen(*i));
        work.extend(chosen.map(|(_, kernel)| (kernel, arch)));
    }
    let errors = Mutex::new(vec![]);
    on_all_cores(&work, |(kernel, arch)| {
        let folder = tempfile::tempdir().expect("a folder for temporary files");
        let fail = |who: &str, error: String| {
            errors.lock().unwrap().push(format!("{} for {arch} by {who}: {error}", kernel.name));
        };
        let ptx = match nvrtc.ptx(&kernel.source, arch) {
            Ok(ptx) => ptx,
            Err(error) => return fail("NVRTC", error),
        };
        for assembler in &assemblers {
            let code = assembler.assemble(&ptx, arch, folder.path()).and_then(|made| {
                if !made.lost.is_empty() {
                    return Err(made.lost.join("\n"));
                }
                let code = Sass::of(nvrtc.root(), arch, &[made.code], &folder.path().join("code"))?;
                code.iter().try_for_each(|sass| check(kernel, sass))
            });
            if let Err(error) = code {
                fail(&assembler.to_string(), error);
            }
        }
    });
    errors.lock().unwrap().extend(traps(&nvrtc, &assemblers));
    let names: Vec<_> = assemblers.iter().map(Ptxas::to_string).collect();
    writeln!(std::io::stdout(), "{} kernels by {}", work.len(), names.join(", ")).expect("it is open");
    let errors = errors.into_inner().unwrap();
    assert!(errors.is_empty(), "{} failed:\n{}", errors.len(), errors.join("\n"));
}
