//! Decoding of asynchronous copies and matrix instructions.

use super::decode::Decoder;
use super::decode_op::{element_types, space};
use super::instr::{Bulk, Mma, Op, Wgmma, Wmma};
use super::operand::{ElementType, Space};
use super::text::Operand;

impl Decoder {
    /// Value of an operand that must be a literal.
    fn literal(operand: Option<&Operand>) -> Result<u32, String> {
        match operand {
            Some(Operand::Imm(value)) => Ok(*value as u32),
            other => Err(format!("{other:?} is no literal")),
        }
    }

    pub(crate) fn copy(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        Ok(Some(match parts {
            ["cp", "async", "bulk", "prefetch", ..] => Op::Nop,
            ["cp", "async", "bulk", "commit_group"] => Op::BulkCommit,
            ["cp", "async", "bulk", "wait_group", ..] => {
                // A wait for reads also waits for the writes, which is allowed at any time after
                // them.
                Op::BulkWait { pending: Self::literal(operands.first())? }
            }
            ["cp", "reduce" | "async", ..] if has("bulk") => return self.bulk(parts, operands),
            ["cp", "async", "commit_group"] => Op::CpAsyncCommit,
            ["cp", "async", "wait_all"] => Op::CpAsyncWait { pending: 0 },
            ["cp", "async", "wait_group"] => Op::CpAsyncWait { pending: Self::literal(operands.first())? },
            ["cp", "async", "mbarrier", "arrive", ..] => {
                let address = self.address(operand(0)?, space(&parts[4..]))?;
                Op::CpAsyncArrive { address, increment: !has("noinc") }
            }
            ["cp", "async", "ca" | "cg", ..] => {
                let to = self.address(operand(0)?, Space::Shared)?;
                let from = self.address(operand(1)?, Space::Global)?;
                let size = Self::literal(operands.get(2))?;
                let hint = parts.iter().any(|part| part.ends_with("cache_hint"));
                let source_size = match operands.get(3) {
                    Some(Operand::Name(name)) if self.predicate(name).is_ok() => return Ok(None),
                    Some(size) if !(hint && operands.len() == 4) => Some(self.source(size, 32)?),
                    _ => None,
                };
                Op::CpAsync { to, from, size, source_size }
            }
            _ => return Ok(None),
        }))
    }

    fn tensor(&mut self, operand: &Operand) -> Result<Bulk, String> {
        match operand {
            Operand::Address(parts, 0) if parts.len() == 2 => {
                let map = self.source(&parts[0], 64)?;
                Ok(Bulk::Tensor { map, coords: self.sources(&parts[1], 32)? })
            }
            _ => Err(format!("{operand:?} is no tensor with coordinates")),
        }
    }

    fn bulk(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        if parts.iter().any(|part| part.starts_with("im2col") || part.starts_with("tile::")) {
            return Ok(None);
        }
        let shared = parts.iter().position(|part| part.starts_with("shared::"));
        let global = parts.iter().position(|part| *part == "global");
        let (Some(shared), Some(global)) = (shared, global) else { return Ok(None) };
        let is_tensor = has("tensor");
        let add = match (parts[1], has("add")) {
            ("reduce", false) => return Ok(None),
            (kind, _) => kind == "reduce",
        };
        // The destination's space comes first.
        if shared < global {
            let to = self.address(operand(0)?, Space::Shared)?;
            let (from, next) = if is_tensor {
                (self.tensor(operand(1)?)?, 2)
            } else {
                let address = self.address(operand(1)?, Space::Global)?;
                (Bulk::Bytes { address, size: self.source(operand(2)?, 32)? }, 3)
            };
            let barrier = self.address(operand(next)?, Space::Shared)?;
            let multicast = if has("multicast::cluster") { Some(self.source(operand(next + 1)?, 16)?) } else { None };
            let pair = has("cta_group::2");
            // Only tensor boxes have the qualifier, and an mbarrier of another block needs a
            // destination in the cluster.
            if (pair && !has("shared::cluster")) || (!is_tensor && (pair || has("cta_group::1"))) {
                return Ok(None);
            }
            return Ok(Some(Op::BulkLoad { to, from, barrier, multicast, pair }));
        }
        if !has("bulk_group") || (add && !is_tensor) {
            return Ok(None);
        }
        let from = self.address(operand(1)?, Space::Shared)?;
        let to = if is_tensor {
            self.tensor(operand(0)?)?
        } else {
            let address = self.address(operand(0)?, Space::Global)?;
            Bulk::Bytes { address, size: self.source(operand(2)?, 32)? }
        };
        Ok(Some(Op::BulkStore { to, from, add }))
    }

    pub(crate) fn matrix_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        let types = element_types(parts);
        match parts {
            ["wgmma", "fence", ..] => Ok(Some(Op::WgmmaFence)),
            ["wgmma", "commit_group", ..] => Ok(Some(Op::WgmmaCommit)),
            ["wgmma", "wait_group", ..] => Ok(Some(Op::WgmmaWait { pending: Self::literal(operands.first())? })),
            ["wgmma", "mma_async", "sync", "aligned", shape, ..] => {
                let [ElementType::F32, a_type, b_type] = types[..] else { return Ok(None) };
                let n = shape.strip_prefix("m64n").and_then(|rest| rest.split('k').next());
                let n: usize = n.and_then(|n| n.parse().ok()).ok_or("no shape")?;
                let k = 32 / a_type.bytes();
                if a_type.bytes() != b_type.bytes() || a_type.bytes() > 2 || !shape.ends_with(&format!("k{k}")) {
                    return Ok(None);
                }
                let d: Vec<u32> = self.targets(operand(0)?)?;
                if d.len() != n / 2 || !n.is_multiple_of(8) || n > 256 {
                    return Err(format!("{} accumulators for N = {n}", d.len()));
                }
                let a = self.sources(operand(1)?, 64)?;
                if a.len() != 1 && a.len() != 4 {
                    return Err(format!("{} registers of A", a.len()));
                }
                let b = self.source(operand(2)?, 64)?;
                let scale_d = operands.get(3).map(|p| self.guard(p)).transpose()?;
                let one = |i: usize| -> Result<bool, String> {
                    match operands.get(i) {
                        None => Ok(false),
                        Some(Operand::Imm(value)) => Ok(*value as i64 == -1),
                        other => Err(format!("{other:?} is no literal")),
                    }
                };
                let negate = [one(4)?, one(5)?];
                let flag = |i: usize| matches!(operands.get(i), Some(Operand::Imm(1)));
                // With A in registers only B has a flag.
                let transposed = if a.len() == 4 { [false, flag(6)] } else { [flag(6), flag(7)] };
                let types = [a_type, b_type];
                Ok(Some(Op::Wgmma(Box::new(Wgmma { n, types, d: d.into(), a, b, scale_d, negate, transposed }))))
            }
            ["mma", "sync", "aligned", shape, "row", "col", ..] => {
                let half = types.first() == Some(&ElementType::F16) && types.last() == Some(&ElementType::F16);
                let [_, a_type, b_type, _] = types[..] else { return Ok(None) };
                let k: usize = match *shape {
                    "m16n8k8" => 8,
                    "m16n8k16" => 16,
                    "m16n8k32" => 32,
                    _ => return Ok(None),
                };
                let bytes = a_type.bytes();
                if bytes != b_type.bytes() || bytes > 2 || (half && bytes != 2) {
                    return Ok(None);
                }
                let d = self.targets(operand(0)?)?;
                let (a, b) = (self.sources(operand(1)?, 32)?, self.sources(operand(2)?, 32)?);
                let c = self.sources(operand(3)?, 32)?;
                let sums = if half { 2 } else { 4 };
                if a.len() * 4 != k * bytes / 2 || b.len() * 2 != a.len() || d.len() != sums || c.len() != sums {
                    return Err("the registers do not fit the shape".into());
                }
                let scales = if parts.contains(&"block_scale") {
                    if parts.contains(&"scale_vec::2X") || parts.contains(&"scale_vec::4X") {
                        return Ok(None);
                    }
                    let mut scale = |i: usize| -> Result<(u32, u32, u32), String> {
                        let register = self.source(operand(i)?, 32)?;
                        let Operand::Vector(ids) = operand(i + 1)? else { return Err("no selectors".into()) };
                        Ok((register, Self::literal(ids.first())?, Self::literal(ids.get(1))?))
                    };
                    Some([scale(4)?, scale(6)?])
                } else {
                    None
                };
                Ok(Some(Op::Mma(Box::new(Mma { k, types: [a_type, b_type], d, a, b, c, scales, half }))))
            }
            ["wmma", ..] => self.wmma(parts, operands),
            _ => Ok(None),
        }
    }

    fn wmma(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        let shapes = [
            ("m16n16k8", [16, 16, 8]),
            ("m16n16k16", [16, 16, 16]),
            ("m32n8k16", [32, 8, 16]),
            ("m8n32k16", [8, 32, 16]),
        ];
        let shape = shapes.into_iter().find(|(name, _)| parts.contains(name)).map(|(_, shape)| shape);
        let (Some(shape), types) = (shape, element_types(parts)) else { return Ok(None) };
        let column = parts.contains(&"col");
        let kind = match parts {
            ["wmma", "load", matrix, ..] => {
                let [ty] = types[..] else { return Ok(None) };
                let d = self.targets(operand(0)?)?;
                let address = self.address(operand(1)?, space(parts))?;
                let stride = self.source(operand(2)?, 32)?;
                let [m, n, k] = shape;
                let size = match *matrix {
                    "a" => [m, k],
                    "b" => [k, n],
                    _ => [m, n],
                };
                Wmma::Load { d, address, stride, size, column, ty }
            }
            ["wmma", "store", ..] => {
                let [ty] = types[..] else { return Ok(None) };
                let address = self.address(operand(0)?, space(parts))?;
                let s = self.sources(operand(1)?, 32)?;
                let size = [shape[0], shape[1]];
                Wmma::Store { s, address, stride: self.source(operand(2)?, 32)?, size, column, ty }
            }
            ["wmma", "mma", ..] => {
                // f16 operands are implicit: `.f32.f32` are D and C.
                let ty = match types[..] {
                    [ElementType::F32, ElementType::F32] => ElementType::F16,
                    [ElementType::F32, a, b, ElementType::F32] if a == b => a,
                    _ => return Ok(None),
                };
                let d = self.targets(operand(0)?)?;
                let (a, b) = (self.sources(operand(1)?, 32)?, self.sources(operand(2)?, 32)?);
                Wmma::Mma { d, a, b, c: self.sources(operand(3)?, 32)?, ty, shape }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Wmma(Box::new(kind))))
    }
}
