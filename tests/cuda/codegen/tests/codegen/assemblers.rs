//! Checks the machine code of several `ptxas` versions for NVRTC's PTX of the tensor core GEMMs, of
//! attention and of AdamW: the same rules apply to each.
//!
//! `FLOAT8_PTXAS` names the assemblers, separated by colons. Without it, or without
//! `FLOAT8_CUDA_TOOLS`, the test is skipped with a message; in CI that is a failure. `FLOAT8_NVRTC`
//! names toolkits whose NVRTC is used instead of `FLOAT8_CUDA_TOOLS`. `FLOAT8_VARIANTS=all`
//! assembles all kernels of Hopper and Blackwell. `.ci/compilers` sets both.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use codegen::expected::{check, family};
use codegen::nvrtc::Nvrtc;
use codegen::parallel::on_all_cores;
use codegen::ptxas::{Ptxas, Version};
use codegen::sass::Sass;
use codegen::variants::{all_are_asked_for, generate};

/// Kernels of each architecture, and a step. Variants 0, `step`, 2 · `step` and so on
/// are assembled, since all would take an hour.
const KERNELS: [(u16, &str, &str, usize); 9] = [
    (90, "sm_90a", "gemm_hopper", 27),
    (90, "sm_90a", "attention_hopper", 3),
    (90, "sm_90a", "attention_tile", 5),
    (90, "sm_90a", "step_elements", 2),
    (80, "sm_80", "attention_mma", 11),
    (120, "sm_120a", "attention_mma", 11),
    (100, "sm_100a", "gemm_blackwell", 51),
    (89, "sm_89", "gemm_mma", 97),
    (120, "sm_120a", "gemm_mma", 97),
];

/// Two-block products, and products of contiguous rows, whose first variants are assembled too.
const FIRSTS: [(&str, &str); 5] = [
    ("gemm_blackwell", "cta_group::2.kind::f8f6f4"),
    ("gemm_blackwell", "cta_group::2.kind::mxf8f6f4"),
    ("gemm_hopper", "add, 1, 1, 0, 1;"),
    ("gemm_hopper", "add, 1, 1, 1, 0;"),
    ("gemm_hopper", "add, 1, 1, 1, 1;"),
];

/// Number of kernels that are disassembled together.
const BATCH: usize = 5;

/// First CUDA version that supports an architecture.
const fn since(sm: u32) -> Version {
    if sm < 100 { (12, 0) } else { (12, 8) }
}

/// Compiler with its CUDA version.
struct Compiler {
    nvrtc: Nvrtc,
    release: Version,
}

impl Compiler {
    fn load(root: &Path) -> Self {
        let load = || -> Result<_, String> {
            let nvrtc = Nvrtc::load(root)?;
            Ok(Self { release: nvrtc.release()?, nvrtc })
        };
        load().unwrap_or_else(|error| panic!("{error}"))
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}.{}", self.release.0, self.release.1)
    }
}

/// Compilers to test: the ones in `FLOAT8_NVRTC`, else the one in the toolkit at `root`.
fn compilers(root: &Path) -> Vec<Compiler> {
    match std::env::var_os("FLOAT8_NVRTC") {
        Some(roots) => std::env::split_paths(&roots).map(|root| Compiler::load(&root)).collect(),
        None => vec![Compiler::load(root)],
    }
}

fn tools() -> Option<(PathBuf, Vec<Ptxas>)> {
    let [tools, assemblers] = ["FLOAT8_CUDA_TOOLS", "FLOAT8_PTXAS"].map(std::env::var_os);
    let (Some(tools), Some(assemblers)) = (tools, assemblers) else {
        test_data::skip(test_data::CUDA_TOOLS);
        return None;
    };
    let assemblers = std::env::split_paths(&assemblers).map(|path| Ptxas::new(&path).unwrap_or_else(|e| panic!("{e}")));
    Some((tools.into(), assemblers.collect()))
}

#[test]
fn the_rules_hold_for_every_assembler() {
    let Some((root, assemblers)) = tools() else { return };
    let compilers = compilers(&root);
    let every = all_are_asked_for();
    let mut work = vec![];
    for (sm, arch, wanted, step) in KERNELS {
        let generated = generate(sm);
        let kernels: Vec<_> = generated.iter().filter(|kernel| family(&kernel.name) == wanted).collect();
        assert!(kernels.len() >= step, "{} of {wanted} for {arch}", kernels.len());
        let first = |text: &str| kernels.iter().position(|kernel| kernel.source.contains(text));
        let firsts = FIRSTS.into_iter().filter(|(of, _)| *of == wanted);
        let firsts: Vec<_> = firsts.map(|(_, text)| first(text).unwrap_or_else(|| panic!("no {text}"))).collect();
        let all = every && matches!(sm, 90 | 100);
        let chosen = |i: usize| all || i.is_multiple_of(step) || firsts.contains(&i);
        let chosen = kernels.into_iter().enumerate().filter(|(i, _)| chosen(*i));
        for (_, kernel) in chosen {
            let knowing = compilers.iter().filter(|compiler| since(sm.into()) <= compiler.release);
            work.extend(knowing.map(|compiler| (kernel.clone(), arch, compiler)));
        }
    }
    let errors = Mutex::new(vec![]);
    let batches: Vec<_> = work.chunk_by(|a, b| a.1 == b.1).flat_map(|of_arch| of_arch.chunks(BATCH)).collect();
    on_all_cores(&batches, |batch| {
        let folder = tempfile::tempdir().expect("a folder for temporary files");
        let arch = batch[0].1;
        let fail = |who: &str, error| errors.lock().unwrap().push(format!("{who} for {arch}: {error}"));
        let (mut made_by, mut cubins) = (vec![], vec![]);
        for (kernel, _, compiler) in *batch {
            let who = format!("{} by {compiler}", kernel.name);
            let ptx = match compiler.nvrtc.ptx(&kernel.source, kernel.sm) {
                Ok(ptx) => ptx,
                Err(error) => {
                    fail(&who, error);
                    continue;
                }
            };
            // `every_kernel_compiles_and_fits` checks the compiler's own assembler.
            let is_other = |assembler: &&Ptxas| every || assembler.release != compiler.release;
            let others = assemblers.iter().filter(is_other);
            for assembler in others.filter(|assembler| since(kernel.sm) <= assembler.release) {
                let who = format!("{who}, {assembler}");
                match assembler.assemble(&ptx, arch, folder.path()) {
                    Ok(made) if made.lost.is_empty() => {
                        made_by.push((kernel, who));
                        cubins.push(made.code);
                    }
                    Ok(made) => fail(&who, made.lost.join("\n")),
                    Err(error) => fail(&who, error),
                }
            }
        }
        match Sass::of(&root, arch, &cubins, &folder.path().join("code")) {
            Ok(all) => {
                for ((kernel, who), sass) in made_by.into_iter().zip(all) {
                    check(kernel, &sass).unwrap_or_else(|error| fail(&who, error));
                }
            }
            Err(error) => fail("disassembly", error),
        }
    });
    let names: Vec<_> =
        compilers.iter().map(Compiler::to_string).chain(assemblers.iter().map(Ptxas::to_string)).collect();
    writeln!(std::io::stdout(), "{} kernels by {}", work.len(), names.join(", ")).expect("it is open");
    let errors = errors.into_inner().unwrap();
    assert!(errors.is_empty(), "{} failed:\n{}", errors.len(), errors.join("\n"));
}
