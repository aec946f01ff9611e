//! Decoding of basic instructions: arithmetic, predicates, memory, control flow.

use super::alu::alu;
use super::compare::compare;
use super::convert::Convert;
use super::decode::Decoder;
use super::instr::{Logic, Op};
use super::operand::{ElementType, Space};
use super::text::Operand;

impl Decoder {
    /// Decodes an operation; None if it is not modelled.
    pub(super) fn op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let ty = parts.last().copied().unwrap_or("");
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        let op = match parts[0] {
            "bra" => {
                let Operand::Name(label) = operand(0)? else { return Err("no label".into()) };
                self.branches.push((self.kernel.code.len(), label.clone(), self.open.clone()));
                Op::Nop
            }
            "ret" | "exit" => Op::Exit,
            "trap" | "brkpt" => Op::Trap,
            "membar" | "pragma" | "nanosleep" | "prefetch" | "prefetchu" | "setmaxnreg" | "griddepcontrol"
            | "discard" | "applypriority" => Op::Nop,
            "fence" if has("proxy") && parts.iter().any(|part| part.starts_with("async")) => Op::FenceProxy,
            "fence" => Op::Nop,
            "setp" => {
                let Some(compare) = compare(parts[1], ty) else { return Ok(None) };
                let logic = ["and", "or", "xor"].into_iter().find(|logic| has(logic)).and_then(logic);
                let combine = match logic {
                    Some(logic) => Some((logic, self.guard(operand(3)?)?)),
                    None => None,
                };
                let (d, d2) = self.pair(operand(0)?)?;
                let bits = bits(ty);
                let (a, b) = (self.source(operand(1)?, bits)?, self.source(operand(2)?, bits)?);
                Op::Setp { compare, d, d2, a, b, combine }
            }
            "selp" => {
                let bits = bits(ty);
                let (a, b) = (self.source(operand(1)?, bits)?, self.source(operand(2)?, bits)?);
                Op::Selp { d: self.target(operand(0)?)?, a, b, p: self.guard(operand(3)?)? }
            }
            "and" | "or" | "xor" | "not" | "mov" if ty == "pred" => {
                let (d, _) = self.pair(operand(0)?)?;
                let a = self.guard(operand(1)?)?;
                match parts[0] {
                    "mov" => Op::Predicate { logic: Logic::Or, d, a, b: (0, false) },
                    "not" => Op::Predicate { logic: Logic::Or, d, a: (a.0, !a.1), b: (0, false) },
                    name => {
                        let logic = logic(name).expect("one of the three");
                        Op::Predicate { logic, d, a, b: self.guard(operand(2)?)? }
                    }
                }
            }
            "mov" if timer(operand(1)?).is_some() => {
                let from = timer(operand(1)?).expect("just asked");
                Op::Timer { d: self.target(operand(0)?)?, from, bits: bits(ty) }
            }
            "mov" if bits(ty) > 64 => return Ok(None),
            "mov" if matches!(operand(1)?, Operand::Vector(_)) => {
                let parts = self.sources(operand(1)?, 64)?;
                let bits = bits(ty) / parts.len() as u32;
                Op::Pack { d: self.target(operand(0)?)?, parts, bits }
            }
            "mov" if matches!(operand(0)?, Operand::Vector(_)) => {
                let parts = self.targets(operand(0)?)?;
                let bits = bits(ty) / parts.len() as u32;
                Op::Unpack { parts, a: self.source(operand(1)?, 64)?, bits }
            }
            "mov" => Op::Move { d: self.target(operand(0)?)?, a: self.source(operand(1)?, bits(ty))? },
            "cvta" if has("shared") || has("shared::cta") || has("shared::cluster") => {
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 64)?);
                Op::ToShared { d, a, to_generic: !has("to") }
            }
            "isspacep" => {
                let (d, _) = self.pair(operand(0)?)?;
                Op::Isspacep { d, a: self.source(operand(1)?, 64)?, space: space(parts) }
            }
            "cvt" => {
                let Some(convert) = Convert::of(parts).filter(Convert::known) else { return Ok(None) };
                let d = self.target(operand(0)?)?;
                let bits = bits(ty);
                let a = self.source(operand(1)?, bits)?;
                let b = if convert.packs() { self.source(operand(2)?, bits)? } else { 0 };
                Op::Convert { convert, d, a, b }
            }
            "lop3" if parts.len() == 2 => {
                let Operand::Imm(table) = operand(4)? else { return Err("no truth table".into()) };
                let mut s = [0; 3];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, 32)?;
                }
                Op::Lop3 { d: self.target(operand(0)?)?, s, table: *table as u32 }
            }
            "bfi" => {
                let mut s = [0; 4];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, if i < 2 { bits(ty) } else { 32 })?;
                }
                Op::Bfi { d: self.target(operand(0)?)?, s, bits: u64::from(bits(ty)) }
            }
            "ld" | "ldu" => {
                let d = self.targets(operand(0)?)?;
                if bits(ty) > 64 {
                    return Ok(None);
                }
                let address = self.address(operand(1)?, space(parts))?;
                Op::Load { d, address, bytes: bits(ty) / 8, signed: ty.starts_with('s') }
            }
            "st" => {
                if has("async") || bits(ty) > 64 {
                    return Ok(None);
                }
                let address = self.address(operand(0)?, space(parts))?;
                Op::Store { s: self.sources(operand(1)?, bits(ty))?, address, bytes: bits(ty) / 8 }
            }
            "atom" | "red" if !has("async") => return self.atomic(parts, operands),
            "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" | "ldmatrix" | "stmatrix" => {
                return self.warp_op(parts, operands);
            }
            "bar" | "barrier" | "mapa" | "getctarank" => return self.block_op(parts, operands),
            "mbarrier" => return self.mbarrier(parts, operands),
            "cp" => return self.copy(parts, operands),
            "mma" | "wmma" | "wgmma" => return self.matrix_op(parts, operands),
            "tcgen05" => return self.tensor_op(parts, operands),
            _ => {
                let Some((arity, function)) = alu(parts).filter(|(arity, _)| arity + 1 == operands.len()) else {
                    return Ok(None);
                };
                let wide = parts[0] == "mad" && has("wide");
                let mut o = [self.target(operand(0)?)?, 0, 0, 0];
                for (i, o) in o.iter_mut().enumerate().skip(1).take(arity) {
                    let bits = if wide && i == 3 { 64 } else { bits(ty) };
                    *o = self.source(operand(i)?, bits)?;
                }
                Op::Alu(function, o)
            }
        };
        Ok(Some(op))
    }
}

/// First bit of `%globaltimer` in a special register.
fn timer(operand: &Operand) -> Option<u32> {
    match operand {
        Operand::Name(name) if name == "%globaltimer" || name == "%globaltimer_lo" => Some(0),
        Operand::Name(name) if name == "%globaltimer_hi" => Some(32),
        _ => None,
    }
}

fn logic(name: &str) -> Option<Logic> {
    Some(match name {
        "and" => Logic::And,
        "or" => Logic::Or,
        "xor" => Logic::Xor,
        _ => return None,
    })
}

/// State space in an opcode.
pub(crate) fn space(parts: &[&str]) -> Space {
    for part in parts {
        match *part {
            "global" | "const" => return Space::Global,
            "shared" | "shared::cta" | "shared::cluster" => return Space::Shared,
            "local" => return Space::Local,
            "param" | "param::entry" => return Space::Param,
            _ => {}
        }
    }
    Space::Generic
}

/// Number of bits of a type.
pub(crate) fn bits(ty: &str) -> u32 {
    if matches!(ty, "f16x2" | "bf16x2") {
        return 32;
    }
    if matches!(ty, "e4m3x2" | "e5m2x2" | "ue8m0x2") {
        return 16;
    }
    if ty == "bf16" {
        return 16;
    }
    ty.get(1..).and_then(|digits| digits.parse().ok()).unwrap_or(32)
}

/// Element types of a matrix instruction, in the order of the opcode.
pub(crate) fn element_types(parts: &[&str]) -> Vec<ElementType> {
    parts.iter().filter_map(|part| ElementType::of(part)).collect()
}
