//! Decoding of atomics, warp collectives and barriers.

use super::decode::Decoder;
use super::decode_op::{bits, space};
use super::instr::{AtomicOp, Barrier, Op, Shuffle, Vote};
use super::operand::Space;
use super::text::Operand;

impl Decoder {
    pub(super) fn atomic(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let names = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let ops = {
            use AtomicOp::{Add, And, Cas, Decrement, Exchange, Increment, Max, Min, Or, Xor};
            [Add, Min, Max, And, Or, Xor, Exchange, Cas, Increment, Decrement]
        };
        let Some(op) = names.iter().position(|name| parts.contains(name)).map(|i| ops[i]) else { return Ok(None) };
        let types = ["u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "b16"];
        let last = parts.last().copied().unwrap_or("");
        let Some(ty) = types.into_iter().find(|ty| *ty == last) else { return Ok(None) };
        if parts.iter().any(|part| ["v2", "v4", "v8"].contains(part)) {
            return Ok(None);
        }
        let (d, rest) = match (parts[0], operands) {
            ("red", rest) => (self.new_register(), rest),
            (_, [d, rest @ ..]) => (self.target(d)?, rest),
            _ => return Err("operands are missing".into()),
        };
        let [address, a, more @ ..] = rest else { return Err("operands are missing".into()) };
        let address = self.address(address, space(parts))?;
        let a = self.source(a, bits(ty))?;
        let b = match (op, more.first()) {
            (AtomicOp::Cas, Some(b)) => self.source(b, bits(ty))?,
            _ => 0,
        };
        Ok(Some(Op::Atomic { op, ty, d, address, a, b }))
    }

    pub(super) fn warp_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        // `%r1|%p1`: a register and a predicate.
        let with_predicate = |decoder: &mut Self| match operand(0)? {
            Operand::Pair(d, p) => {
                let d = if d == "_" { Operand::Sink } else { Operand::Name(d.clone()) };
                let p = if p == "_" { None } else { Some(decoder.predicate(p)?) };
                Ok::<_, String>((decoder.target(&d)?, p))
            }
            d => Ok((decoder.target(d)?, None)),
        };
        Ok(Some(match parts[0] {
            "shfl" if has("sync") => {
                let kind = match parts[2] {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Butterfly,
                    _ => Shuffle::Index,
                };
                let (d, p) = with_predicate(self)?;
                let mut s = [0; 4];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, 32)?;
                }
                Op::Shuffle { kind, d, p, a: s[0], b: s[1], c: s[2], mask: s[3] }
            }
            "vote" if has("sync") => {
                let kind = match parts[2] {
                    "all" => Vote::All,
                    "any" => Vote::Any,
                    "uni" => Vote::Uniform,
                    _ => Vote::Ballot,
                };
                let d = match kind {
                    Vote::Ballot => self.target(operand(0)?)?,
                    _ => self.pair(operand(0)?)?.0,
                };
                Op::Vote { kind, d, p: self.guard(operand(1)?)?, mask: self.source(operand(2)?, 32)? }
            }
            "match" => {
                let (d, p) = with_predicate(self)?;
                let a = self.source(operand(1)?, 64)?;
                Op::Match { d, p, a, mask: self.source(operand(2)?, 32)?, all: has("all") }
            }
            "redux" => {
                let names = ["add", "min", "max", "and", "or", "xor"];
                let ops = [AtomicOp::Add, AtomicOp::Min, AtomicOp::Max, AtomicOp::And, AtomicOp::Or, AtomicOp::Xor];
                let Some(op) = names.iter().position(|name| has(name)).map(|i| ops[i]) else { return Ok(None) };
                if has("f32") {
                    return Ok(None);
                }
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 32)?);
                Op::Redux { op, signed: has("s32"), d, a, mask: self.source(operand(2)?, 32)? }
            }
            "elect" => {
                let (d, p) = with_predicate(self)?;
                let p = p.unwrap_or_else(|| self.new_predicate());
                Op::Elect { d, p, mask: self.source(operand(1)?, 32)? }
            }
            "activemask" => Op::Activemask { d: self.target(operand(0)?)? },
            "ldmatrix" if has("m8n8") && has("b16") => {
                let d = self.targets(operand(0)?)?;
                Op::Ldmatrix { d, address: self.address(operand(1)?, Space::Shared)?, transposed: has("trans") }
            }
            "stmatrix" if has("m8n8") && has("b16") => {
                let address = self.address(operand(0)?, Space::Shared)?;
                Op::Stmatrix { s: self.sources(operand(1)?, 32)?, address, transposed: has("trans") }
            }
            _ => return Ok(None),
        }))
    }

    pub(super) fn block_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        Ok(Some(match parts {
            ["bar", "warp", "sync"] => Op::SyncWarp { mask: self.source(operand(0)?, 32)? },
            ["barrier", "cluster", "arrive", ..] => Op::ClusterArrive,
            ["barrier", "cluster", "wait", ..] => Op::ClusterWait,
            ["bar" | "barrier", ..] if !has("red") && (has("sync") || has("arrive")) => {
                let id = self.source(operand(0)?, 32)?;
                let count = operands.get(1).map(|count| self.source(count, 32)).transpose()?;
                // `bar` is `barrier.aligned`.
                Op::Bar { id, count, wait: has("sync"), aligned: parts[0] == "bar" || has("aligned") }
            }
            ["mapa", ..] => {
                let generic = !has("shared::cluster");
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 64)?);
                Op::Mapa { d, a, rank: self.source(operand(2)?, 32)?, generic }
            }
            _ => return Ok(None),
        }))
    }

    pub(super) fn mbarrier(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let mut rest = operands;
        let at = if parts.iter().any(|part| part.starts_with("shared")) { Space::Shared } else { Space::Generic };
        if matches!(parts[1], "test_wait" | "try_wait") {
            let [p, address, value, ..] = operands else { return Err("operands are missing".into()) };
            let (p, _) = self.pair(p)?;
            let address = self.address(address, at)?;
            let value = self.source(value, 64)?;
            let may_block = parts[1] == "try_wait";
            return Ok(Some(Op::MbarrierWait { p, address, value, parity: has("parity"), may_block }));
        }
        let op = match parts[1] {
            "init" => Barrier::Init,
            "inval" => Barrier::Invalidate,
            "expect_tx" => Barrier::ExpectTx,
            "complete_tx" => Barrier::CompleteTx,
            "arrive" if !has("noComplete") => Barrier::Arrive { expect: has("expect_tx"), drop: false },
            "arrive_drop" if !has("noComplete") => Barrier::Arrive { expect: has("expect_tx"), drop: true },
            _ => return Ok(None),
        };
        let d = match rest {
            [Operand::Address(..), ..] => self.new_register(),
            [d, others @ ..] => {
                rest = others;
                self.target(d)?
            }
            [] => return Err("operands are missing".into()),
        };
        let [address, value @ ..] = rest else { return Err("operands are missing".into()) };
        let address = self.address(address, at)?;
        let value = value.first().map(|value| self.source(value, 32)).transpose()?;
        Ok(Some(Op::Mbarrier { op, d, address, value }))
    }
}
