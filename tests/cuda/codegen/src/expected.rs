//! Rules for the machine code of each kernel, by architecture.

use std::collections::BTreeSet;

use crate::device::{Generated, max_shared_memory};
use crate::sass::Sass;

/// Rules for one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Minimum number of blocks per SM.
    pub blocks: usize,
    /// Exact registers per thread, if the source depends on it: the registers released at the start
    /// must cover those requested.
    pub registers: Option<usize>,
    /// Registers per thread that each `setmaxnreg` requests.
    pub set_registers: BTreeSet<u32>,
    /// Maximum bytes of local memory per thread.
    pub local: usize,
    /// Groups of opcodes, with the minimum number of instructions of each group.
    pub required: Vec<(&'static [&'static str], usize)>,
    /// Opcodes that must not occur.
    pub forbidden: Vec<&'static str>,
    /// Whether GPU-wide fences may occur outside of cluster barriers.
    pub may_fence: bool,
}

/// Name of the kernel without the types it is generated for.
pub fn family(name: &str) -> &str {
    let end = ["_n_", "_o_", "_p_"].iter().filter_map(|types| name.find(types)).min();
    &name[..end.unwrap_or(name.len())]
}

/// Whether to compile all variants of a kernel for an architecture, because no earlier one has the
/// same code.
pub fn is_native(kernel: &Generated) -> bool {
    matches!(
        (family(&kernel.name), kernel.sm),
        ("gemm_half" | "attention_mma", 80) | ("gemm_mma", 89 | 120) | ("attention_mma", 120) | ("gemm_blackwell", _)
    )
}

/// PTX instructions in a source, with the opcodes they must become.
const TRANSLATED: [(&str, &str); 24] = [
    ("k32.f32.e", "QGMMA"),
    ("k16.f32.bf16.bf16", "HGMMA"),
    ("k16.f32.f16.f16", "HGMMA"),
    ("tcgen05.mma.cta_group::1.kind::f8f6f4", "UTCQMMA"),
    ("tcgen05.mma.cta_group::1.kind::mxf8f6f4", "UTCQMMA.SF"),
    ("tcgen05.mma.cta_group::2.kind::f8f6f4", "UTCQMMA.2CTA"),
    ("tcgen05.mma.cta_group::2.kind::mxf8f6f4", "UTCQMMA.2CTA.SF"),
    ("tcgen05.commit.cta_group::2", "UTCBAR.2CTA.MULTICAST"),
    ("tcgen05.alloc.cta_group::2", "UTCATOMSWS.2CTA"),
    ("tcgen05.cp", "UTCCP"),
    ("tcgen05.cp.cta_group::2", "UTCCP.T.S.2CTA"),
    ("tcgen05.ld", "LDTM"),
    ("cp.async.bulk.shared", "UBLKCP"),
    ("cp.async.bulk.tensor.2d.shared", "UTMALDG"),
    ("cp.async.bulk.tensor.4d.shared", "UTMALDG.4D"),
    ("bytes.multicast::cluster", "UTMALDG.2D.MULTICAST"),
    ("bytes.cta_group::2", "UTMALDG.2D.2CTA"),
    ("cp.async.bulk.tensor.3d.global", "UTMASTG"),
    ("st.global.v4.b32", "STG.E.128"),
    ("setmaxnreg.inc", "USETMAXREG"),
    ("ex2.approx", "MUFU.EX2"),
    ("cvt.rn.satfinite", "F2FP.SATFINITE"),
    ("ld.global.v2.b32", "LDG.E.64"),
    ("ld.global.v4.b32", "LDG.E.128"),
];

/// Casts to FP8.
const CASTS: [&str; 3] = ["cast_linear", "cast_tiles", "cast_rows"];

/// Fused operations.
const FUSED: [&str; 5] = ["swiglu_forward", "swiglu_gradients", "rms_norm_forward", "rms_norm_gradients", "rotate"];

/// Rules for a kernel, by its name, types and compute capability.
///
/// Blocks have 256 threads. 29 KB in flight per SM keep the memory of an H200 busy (4.8 TB/s for
/// 0.8 µs over 132 SMs). Blocks at a barrier or a store have none in flight, so the rules require
/// at least twice that:
///
/// | kernel | bytes per thread | blocks | KiB in flight |
/// | --- | --- | --- | --- |
/// | `partial_maxima` | 64 | 4 | 64 |
/// | `cast_linear`, `line_maxima` | 128 | 4 | 128 |
/// | `cast_tiles` | 128 | 3 | 96 |
/// | `cast_tiles` with scales of blocks | 128 (16-bit floats), 256 (f32) | 2 | 64, 128 |
/// | `cast_rows` | up to 128, or up to 256 | 2 | 64 to 128 |
/// | `swiglu`, `rms_norm`, `rotate` | 32 or more | 4 | 32 |
/// | `step_elements` (AdamW) | 64 | 3 | 48 |
/// | `transpose_codes` | 64 | 4 | 64 |
/// | `dequantize` | 32 | 8, or 6 where fewer threads fit or registers are for the conversion | 64, 48 |
///
/// Casts of ragged rows load element by element with the same bytes in flight; two blocks of them
/// fit. The integer encoder of Ampere needs more registers, but its memory half the bytes in flight
/// (2 TB/s over 108 SMs, 15 KB). GEMMs on tensor cores prefetch, and the warps of one block have
/// enough independent products.
pub fn expected(kernel: &Generated) -> Rules {
    let (name, sm) = (kernel.name.as_str(), kernel.sm);
    let family = family(name);
    let is_cast = CASTS.contains(&family);
    let vectors = name.contains("_n_4");
    // With scales of blocks, a tile's scales pass through shared memory.
    let makes_scales = kernel.source.contains("float *shared_memory");
    let blocks = match family {
        "cast_tiles" if makes_scales && sm < 89 => 1,
        "cast_tiles" if makes_scales => 2,
        "cast_rows" => 2,
        "step_elements" => 3,
        "dequantize" if matches!(sm, 90 | 100) => 8,
        "dequantize" => 6,
        "cast_tiles" if vectors && sm >= 89 => 3,
        "cast_linear" if vectors && sm >= 89 => 4,
        "cast_tiles" | "cast_linear" => 2,
        "gemm_blackwell" | "gemm_hopper" | "gemm_mma" | "gemm_half" | "attention_hopper" | "attention_mma"
        | "attention_tile" => 1,
        _ => 4,
    };
    let (mut required, mut forbidden): (Vec<(&'static [&'static str], usize)>, _) = (vec![], vec![]);
    if is_cast && sm >= 89 {
        // Each instruction converts two elements, and a unit holds at least eight.
        required.push((&["F2FP.SATFINITE"], 4));
    } else if is_cast {
        forbidden.push("F2FP.SATFINITE");
    }
    match family {
        _ if !vectors => {}
        "cast_rows" => required.push((&["LDG.E.128"], 2)),
        "partial_maxima" => required.push((&["LDG.E.128"], 4)),
        "cast_linear" | "cast_tiles" | "line_maxima" => required.push((&["LDG.E.128"], 8)),
        _ => {}
    }
    // Vectors of 16 bytes, of two tensors or two of one. With f32 inputs, vectors of 16-bit floats
    // have half of that.
    let is_wide = name.contains("_n_8") || vectors && name.contains("_o_f32");
    if FUSED.contains(&family) && is_wide {
        required.extend([(&["LDG.E.128"] as &[_], 2), (&["STG.E.128"], 1)]);
    }
    // A sector of 32 bytes has 8 codes of f32 or 16 of 16-bit floats; by columns always 16.
    match family {
        "cast_tiles" if !makes_scales => required.push((&["STG.E.128"], 2)),
        "cast_linear" | "cast_rows" | "cast_tiles" if name.contains("_m_4") => required.push((&["STG.E.128"], 1)),
        _ if is_cast => required.push((&["STG.E.64", "STG.E.128"], 1)),
        _ => {}
    }
    match (family, sm) {
        // Rows of 16 bytes to and from a unit, and the same through shared memory; words between
        // them are permuted, not shifted.
        ("transpose_codes", _) => {
            required.extend([(&["LDG.E.128"] as &[_], 4), (&["STG.E.128"], 4), (&["LDS.128"], 4), (&["PRMT"], 24)]);
        }
        ("step_elements", _) if name.contains("_n_8") || name.contains("_p_f32_m_f32_g_f32_n_4") => {
            required.extend([(&["LDG.E.128"] as &[_], 4), (&["STG.E.128"], 3)]);
        }
        ("dequantize_f32", _) if vectors => required.push((&["STG.E.128"], 1)),
        // A chunk of each of four columns and of a row; hardware conversions where available.
        ("gemv", _) => {
            required.extend([(&["LDG.E.128"] as &[_], 5), (&["FFMA"], 64), (&["SHFL"], 20)]);
            if sm >= 89 {
                required.push((&["F2FP.F16"], 40));
            }
        }
        ("gemm_hopper", _) => {
            // A stage's four products.
            required.push((&["QGMMA", "HGMMA"], 4));
            forbidden.extend(["HMMA", "QMMA"]);
        }
        // All loads precede the conversions, which use hardware instructions where available.
        ("dequantize", _) => {
            required.extend([(&["LDG.E.64"] as &[_], 4), (&["STG.E.128"], 4)]);
            if sm >= 89 {
                required.push((&["F2FP.BF16"], 16));
            }
        }
        // Addresses in uniform registers without a loop over threads: the assembler knows that one
        // thread issues the products.
        ("gemm_blackwell", _) => forbidden.extend(["HMMA", "QMMA", "R2UR.BROADCAST"]),
        // FP8 products, fragments by `ldmatrix`, copies by `cp.async`.
        ("gemm_mma", 89) => {
            required.extend([(&["QMMA"] as &[_], 1), (&["LDSM"], 1), (&["LDGSTS"], 1)]);
            forbidden.extend(["QMMA.SF", "HMMA"]);
        }
        // The unscaled form has half the rate of the block-scaled one.
        ("gemm_mma", _) => {
            required.extend([(&["QMMA.SF"] as &[_], 1), (&["LDSM"], 1), (&["LDGSTS"], 1)]);
            forbidden.extend(["QMMA.16832", "HMMA"]);
        }
        // Both products, fragments of the second from the first's accumulators and by transposed
        // `ldmatrix`, copies by `cp.async`.
        ("attention_mma", _) => {
            required.extend([(&["HMMA.16816"] as &[_], 64), (&["LDSM"], 8), (&["LDSM.16.MT88"], 8)]);
            required.extend([(&["LDGSTS"] as &[_], 8), (&["MUFU.EX2"], 8), (&["F2FP"], 8)]);
            forbidden.push("QMMA");
        }
        // A step has at least twelve products, and its weights stay in registers.
        ("attention_hopper", _) => {
            required.extend([(&["HGMMA"] as &[_], 12), (&["MUFU.EX2"], 16), (&["F2FP"], 16)]);
            forbidden.push("HMMA");
        }
        ("attention_tile", _) => required.extend([(&["LDS.128"] as &[_], 4), (&["FFMA"], 64)]),
        ("gemm_half", _) => {
            required.extend([(&["HMMA"] as &[_], 1), (&["LDG.E.128"], 1)]);
            // Fragments of bf16 are loaded word by word.
            required.push((if name.contains("_e_bf16") { &["LDS"] } else { &["LDSM"] }, 1));
            forbidden.push("QMMA");
        }
        _ => {}
    }
    if kernel.source.contains(".kind::f8f6f4") {
        forbidden.extend(["UTCQMMA.SF", "UTCQMMA.2CTA.SF"]);
    }
    // With two blocks every instruction covers both, and plain copies would report to the wrong
    // block.
    forbidden.push(if kernel.source.contains("cta_group::2") { "UBLKCP" } else { "UTCQMMA.2CTA" });
    // An output whose rows are a multiple of 16 bytes apart is never stored by elements, even at
    // the end of a group.
    if kernel.source.contains("cp.async.bulk.tensor.3d.global") {
        forbidden.extend(["STG.E.U16", "STG.E.U8"]);
    }
    for (ptx, opcode) in &TRANSLATED {
        if kernel.source.contains(ptx) {
            required.push((core::slice::from_ref(opcode), 1));
        }
    }
    // 384 threads start with 168 each, and end with 40 and twice 232, or 56 and twice 224.
    let registers = kernel.source.contains("setmaxnreg").then_some(168);
    let set_registers = set_registers(&kernel.source);
    // On sm_120 ptxas 13.0 fits one more block by spilling six words, 13.5 two. On sm_100 some
    // GEMMs to f32 spill up to four words of the epilogue, which are read once per tile.
    let to_f32 = name.contains("_o_f32");
    let local = match (family, sm) {
        ("gemm_mma", 120) if to_f32 => 24,
        ("gemm_mma", 120) => 8,
        ("gemm_blackwell", _) if to_f32 => 16,
        // Two blocks leave 255 registers, which sums, scores and fragments of 32 rows take: ptxas
        // spills a few addresses and factors, 40 accesses in a step of 256 products.
        ("attention_mma", _) => 64,
        // dk and dv of heads of 64, in steps of 128 queries: 16 words, in 24 products of a step.
        ("attention_hopper", _) => 64,
        // Stores one register and loads it once.
        ("gemm_half", 80) => 8,
        // The f32 variant stores one register and loads it once.
        ("rms_norm_forward", 80) => 8,
        // The f16 variant has six accesses.
        ("rms_norm_gradients", 90) => 8,
        _ => 0,
    };
    // Mbarriers order TMA copies: a fence in the main loop would cost as much as a step.
    let may_fence = !matches!(family, "gemm_hopper" | "gemm_blackwell" | "attention_hopper");
    Rules { blocks, registers, set_registers, local, required, forbidden, may_fence }
}

/// Numbers of `setmaxnreg.dec.sync.aligned.u32 40;` and similar.
fn set_registers(source: &str) -> BTreeSet<u32> {
    let number = |rest: &str| rest.split_once("u32 ")?.1.split_once(';')?.0.parse().ok();
    source.split("setmaxnreg.").skip(1).map(|rest| number(rest).expect("`setmaxnreg` has a number")).collect()
}

/// Checks the machine code of a kernel.
///
/// # Errors
/// The violated rule.
pub fn check(kernel: &Generated, sass: &Sass) -> Result<(), String> {
    let rules = expected(kernel);
    if sass.local > rules.local {
        let accesses = sass.count("LDL") + sass.count("STL");
        return Err(format!("{} bytes of local memory, {accesses} accesses to it", sass.local));
    }
    let (shared, most) = (sass.shared + kernel.dynamic_shared, max_shared_memory(kernel.sm));
    if shared > most {
        return Err(format!("{shared} bytes of shared memory, a block has {most}"));
    }
    let fits = sass.occupancy(kernel.sm, kernel.threads(), kernel.dynamic_shared);
    if fits < rules.blocks {
        return Err(format!(
            "{} registers and {shared} bytes of shared memory: {fits} blocks fit, not {}",
            sass.registers, rules.blocks
        ));
    }
    if rules.registers.is_some_and(|registers| registers != sass.registers) {
        return Err(format!("{} registers, not {:?}", sass.registers, rules.registers));
    }
    if rules.set_registers != sass.set_registers {
        return Err(format!("setmaxnreg to {:?}, not {:?}", sass.set_registers, rules.set_registers));
    }
    for (opcodes, least) in rules.required {
        let count: usize = opcodes.iter().map(|opcode| sass.count(opcode)).sum();
        if count < least {
            return Err(format!("{count} of {}, not {least}", opcodes.join(" and ")));
        }
    }
    if sass.stray_fences > 0 && !rules.may_fence {
        return Err(format!(
            "{} fences of the whole GPU or its L1 caches outside barriers of the cluster",
            sass.stray_fences
        ));
    }
    for opcode in rules.forbidden {
        if sass.count(opcode) > 0 {
            return Err(format!("{} of {opcode}", sass.count(opcode)));
        }
    }
    Ok(())
}
