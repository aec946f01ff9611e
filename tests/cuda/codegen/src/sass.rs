//! Analysis of cubins: registers and memory from the resource table, instructions from the
//! disassembly.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use object::{Object, ObjectSection};

/// Machine code of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sass {
    /// Registers per thread.
    pub registers: usize,
    /// Bytes of stack and local memory per thread: spills, or arrays indexed at run time.
    pub local: usize,
    /// Bytes of static shared memory per block.
    pub shared: usize,
    /// Number of occurrences of each opcode, without operands and predicates, such as `LDG.E.128`.
    /// A `tcgen05` product with scales, which has one more operand, is named `UTCQMMA.SF` or
    /// `UTCQMMA.2CTA.SF`.
    pub opcodes: BTreeMap<String, usize>,
    /// GPU-wide fences and L1 invalidations that do not belong to a cluster barrier.
    pub stray_fences: usize,
    /// Registers per thread after each `setmaxnreg`.
    pub set_registers: BTreeSet<u32>,
}

/// Maximum distance in instructions between a cluster barrier and the fences that belong to it.
const FENCE_DISTANCE: usize = 16;

/// Number of [stray fences](Sass::stray_fences) in a sequence of opcodes.
fn stray_fences(code: &[&str]) -> usize {
    let is_fence = |opcode: &str| opcode == "CCTL.IVALL" || opcode.starts_with("MEMBAR") && opcode.ends_with(".GPU");
    let near = |at: usize| {
        let around = at.saturating_sub(FENCE_DISTANCE)..(at + FENCE_DISTANCE + 1).min(code.len());
        code[around].iter().any(|opcode| opcode.starts_with("UCGABAR"))
    };
    (0..code.len()).filter(|&at| is_fence(code[at]) && !near(at)).count()
}

impl Sass {
    /// Reads cubins of one architecture, such as `sm_90a`, with `cuobjdump` and `nvdisasm` of the
    /// toolkit at `root`. `nvdisasm` takes most of a second to start, so it gets the code of all
    /// cubins at once. Writes to `file`.
    ///
    /// # Errors
    /// A missing or failing tool, or output that cannot be parsed.
    pub fn of(root: &Path, arch: &str, cubins: &[Vec<u8>], file: &Path) -> Result<Vec<Self>, String> {
        let write = |bytes: &[u8]| std::fs::write(file, bytes).map_err(|error| format!("{}: {error}", file.display()));
        let (mut all, mut code, mut ends) = (vec![], vec![], vec![]);
        for cubin in cubins {
            write(cubin)?;
            all.push(Self::usage(root, file)?);
            let elf = object::File::parse(&**cubin).map_err(|error| error.to_string())?;
            for section in elf.sections().filter(|section| section.name().is_ok_and(|name| name.starts_with(".text.")))
            {
                code.extend_from_slice(section.data().map_err(|error| error.to_string())?);
            }
            ends.push(code.len());
        }
        write(&code)?;
        let binary = arch.replace("sm_", "SM");
        let disassembly = run(root, "nvdisasm", &["-b", &binary], file)?;
        let mut instructions = vec![vec![]; all.len()];
        for line in disassembly.lines() {
            let Some((address, opcode)) = opcode(line) else { continue };
            let owner = ends.partition_point(|&end| end <= address);
            let code = instructions.get_mut(owner).ok_or_else(|| format!("code of nobody at {address:#x}"))?;
            code.push(opcode);
            if opcode.starts_with("USETMAXREG") {
                all[owner].set_registers.insert(immediate(line).ok_or_else(|| format!("no number in {line:?}"))?);
            }
        }
        for (sass, code) in all.iter_mut().zip(instructions) {
            sass.stray_fences = stray_fences(&code);
            for opcode in code {
                *sass.opcodes.entry(opcode.into()).or_default() += 1;
            }
        }
        match all.iter().position(|sass| sass.opcodes.is_empty()) {
            Some(i) => Err(format!("nvdisasm shows no instruction of kernel {i} of {}", all.len())),
            None => Ok(all),
        }
    }

    /// Reads a cubin's resource table.
    fn usage(root: &Path, cubin: &Path) -> Result<Self, String> {
        let usage = run(root, "cuobjdump", &["-res-usage"], cubin)?;
        // " Function f: REG:32 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:400 ..."
        let line = usage.lines().find(|line| line.contains("REG:")).ok_or_else(|| format!("no usage in {usage:?}"))?;
        let field = |name: &str| {
            let value = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix(':'));
            value.and_then(|value| value.parse::<usize>().ok()).ok_or_else(|| format!("no {name} in {line:?}"))
        };
        let local = field("STACK")? + field("LOCAL")?;
        Ok(Self { registers: field("REG")?, local, shared: field("SHARED")?, ..Self::default() })
    }

    /// Number of instructions in a family: `count("LDG")` includes `LDG` and `LDG.E.128`.
    pub fn count(&self, family: &str) -> usize {
        let belongs =
            |opcode: &str| opcode == family || opcode.strip_prefix(family).is_some_and(|s| s.starts_with('.'));
        self.opcodes.iter().filter(|(opcode, _)| belongs(opcode)).map(|(_, count)| count).sum()
    }

    /// Number of blocks of `threads` that fit on an SM of architecture `sm`, by registers, shared
    /// memory and threads. The limits are from the CUDA programming guide's table of compute
    /// capabilities.
    pub fn occupancy(&self, sm: u32, threads: u32, dynamic_shared: usize) -> usize {
        let (max_threads, shared, blocks) = match sm {
            86 | 89 => (1536, 100 * 1024, 24),
            120.. => (1536, 100 * 1024, 32),
            80 | 87 => (2048, 164 * 1024, 32),
            _ => (2048, 228 * 1024, 32),
        };
        let threads = threads as usize;
        // Registers are allocated per warp in units of 256. The system reserves a kilobyte of
        // shared memory per block.
        let warps = threads.div_ceil(32);
        let by_registers = 65536 / (warps * (self.registers.max(1) * 32).next_multiple_of(256));
        let by_shared = shared / (self.shared + dynamic_shared + 1024);
        by_registers.min(by_shared).min(max_threads / threads).min(blocks)
    }
}

/// Address and opcode of a line such as `/*0040*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`.
fn opcode(line: &str) -> Option<(usize, &str)> {
    let (address, code) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let address = usize::from_str_radix(address, 16).ok()?;
    let mut words = code.split_whitespace();
    let first = words.next()?;
    let opcode = if first.starts_with('@') { words.next()? } else { first };
    let opcode = opcode.starts_with(|c: char| c.is_ascii_uppercase()).then(|| opcode.trim_end_matches(';'))?;
    // A `tcgen05` product with scales has one more operand.
    let scaled = line.split("idesc").nth(1).is_some_and(|rest| rest.contains("tmem"));
    let opcode = match opcode {
        "UTCQMMA" if scaled => "UTCQMMA.SF",
        "UTCQMMA.2CTA" if scaled => "UTCQMMA.2CTA.SF",
        other => other,
    };
    Some((address, opcode))
}

/// Last operand of a line such as `/*0050*/  USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;`.
fn immediate(line: &str) -> Option<u32> {
    let (_, number) = line.trim_end().trim_end_matches(';').trim_end().rsplit_once(" 0x")?;
    u32::from_str_radix(number, 16).ok()
}

fn run(root: &Path, tool: &str, options: &[&str], file: &Path) -> Result<String, String> {
    let path = root.join("bin").join(tool);
    let output = Command::new(&path).args(options).arg(file).output();
    let output = output.map_err(|error| format!("{}: {error}", path.display()))?;
    if !output.status.success() {
        return Err(format!("{tool}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_read_from_disassembly() {
        assert_eq!(
            opcode("        /*0040*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"),
            Some((64, "LDG.E.128"))
        );
        assert_eq!(opcode("        /*0050*/                   EXIT ;"), Some((80, "EXIT")));
        assert_eq!(
            opcode("        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;"),
            Some((96, "BAR.SYNC.DEFER_BLOCKING"))
        );
        let product = |opcode: &str, scales: &str| {
            format!(
                "        /*3530*/ {opcode} gdesc[UR18], gdesc[UR20], tmem[UR38], tmem[UR30], idesc[UR31],{scales} !UPT ;"
            )
        };
        for (written, scales, read) in [
            ("UTCQMMA", "", "UTCQMMA"),
            ("UTCQMMA", " tmem[UR16],", "UTCQMMA.SF"),
            ("UTCQMMA.2CTA", "", "UTCQMMA.2CTA"),
            ("UTCQMMA.2CTA", " tmem[UR16],", "UTCQMMA.2CTA.SF"),
        ] {
            assert_eq!(opcode(&product(written, scales)), Some((0x3530, read)));
        }
        assert_eq!(immediate("        /*0050*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;"), Some(232));
        assert_eq!(immediate("        /*00a0*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28;"), Some(40));
        assert_eq!(immediate("        /*00a0*/                   USETMAXREG.DEALLOC.CTAPOOL UR4;"), None);
        assert_eq!(opcode(".section .text.f, \"ax\""), None);
        assert_eq!(opcode("        /* a comment */"), None);
    }

    #[test]
    fn families_do_not_run_into_each_other() {
        let opcodes = [("LD", 1), ("LDL.64", 2), ("LDL", 3), ("LDLX", 5)].map(|(name, n)| (name.to_string(), n)).into();
        let sass = Sass { opcodes, ..Sass::default() };
        assert_eq!((sass.count("LDL"), sass.count("LD"), sass.count("STL")), (5, 1, 0));
    }

    #[test]
    fn fences_far_from_a_barrier_of_the_cluster_are_stray() {
        let mut code = vec!["FADD"; 100];
        for (at, opcode) in [(10, "MEMBAR.ALL.GPU"), (14, "UCGABAR_ARV"), (16, "UCGABAR_WAIT"), (18, "CCTL.IVALL")] {
            code[at] = opcode;
        }
        assert_eq!(stray_fences(&code), 0);
        (code[60], code[61], code[90]) = ("MEMBAR.ALL.CTA", "MEMBAR.SC.GPU", "CCTL.IVALL");
        assert_eq!(stray_fences(&code), 2);
    }

    #[test]
    fn occupancy_is_the_least_of_its_limits() {
        let sass = |registers, shared| Sass { registers, shared, ..Sass::default() };
        assert_eq!(sass(32, 0).occupancy(90, 256, 0), 8);
        assert_eq!(sass(128, 0).occupancy(90, 256, 0), 2);
        assert_eq!(sass(32, 47 * 1024).occupancy(90, 256, 0), 4);
        assert_eq!(sass(32, 0).occupancy(120, 256, 0), 6);
        assert_eq!(sass(32, 0).occupancy(90, 32, 0), 32);
    }
}
