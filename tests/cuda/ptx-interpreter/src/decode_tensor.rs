//! Decoding of `tcgen05` for a block or a pair of blocks: dense FP8 products of operands in shared
//! memory, and copies of scales.

use super::decode::Decoder;
use super::instr::{Op, TensorOp, TensorWarpOp};
use super::operand::Space;
use super::text::Operand;

impl Decoder {
    pub(super) fn tensor_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        if let Some(group) = parts.iter().find_map(|part| part.strip_prefix("cta_group::")) {
            let blocks = group.parse().map_err(|_| format!("cta_group::{group}"))?;
            let first = *self.kernel.cta_group.get_or_insert(blocks);
            if first != blocks {
                return Err(format!(
                    "an instruction before it has cta_group::{first}, and all of a kernel have the same"
                ));
            }
        }
        // Addresses of tensor memory are plain numbers.
        let (tensor, shared) = (Space::Global, Space::Shared);
        Ok(Some(match parts {
            ["tcgen05", "fence::before_thread_sync"] => Op::Tensor(Box::new(TensorOp::Before)),
            ["tcgen05", "fence::after_thread_sync"] => Op::Tensor(Box::new(TensorOp::After)),
            ["tcgen05", "alloc", ..] if has("shared::cta") => {
                let slot = self.address(operand(0)?, shared)?;
                let columns = self.source(operand(1)?, 32)?;
                Op::TensorWarp(TensorWarpOp::Alloc { slot, columns })
            }
            ["tcgen05", "dealloc", ..] => {
                let (address, columns) = (self.source(operand(0)?, 32)?, self.source(operand(1)?, 32)?);
                Op::TensorWarp(TensorWarpOp::Dealloc { address, columns })
            }
            ["tcgen05", "relinquish_alloc_permit", ..] => Op::TensorWarp(TensorWarpOp::Relinquish),
            ["tcgen05", "commit", ..] if has("mbarrier::arrive::one") => {
                let barrier = self.address(operand(0)?, shared)?;
                let multicast = if has("multicast::cluster") { Some(self.source(operand(1)?, 16)?) } else { None };
                Op::Tensor(Box::new(TensorOp::Commit { barrier, multicast }))
            }
            ["tcgen05", "cp", _, "32x128b", "warpx4"] => {
                let (to, from) = (self.address(operand(0)?, tensor)?, self.source(operand(1)?, 64)?);
                Op::Tensor(Box::new(TensorOp::Copy { to, from }))
            }
            ["tcgen05", "mma", "cta_group::1" | "cta_group::2", kind @ ..] => {
                let (block_scale, predicate) = match kind {
                    ["kind::f8f6f4"] => (false, 4),
                    ["kind::mxf8f6f4", "block_scale"]
                    | ["kind::mxf8f6f4", "block_scale", "scale_vec::1X" | "block32"] => (true, 6),
                    _ => return Ok(None),
                };
                let Operand::Address(..) = operand(0)? else { return Err("no address of the sums".into()) };
                let d = self.address(operand(0)?, tensor)?;
                let (a, b) = (self.source(operand(1)?, 64)?, self.source(operand(2)?, 64)?);
                let instruction = self.source(operand(3)?, 32)?;
                let scales = match block_scale {
                    true => Some([self.address(operand(4)?, tensor)?, self.address(operand(5)?, tensor)?]),
                    false => None,
                };
                if operands.len() != predicate + 1 {
                    return Ok(None);
                }
                let keep = self.guard(operand(predicate)?)?;
                Op::Tensor(Box::new(TensorOp::Mma { d, a, b, instruction, scales, keep }))
            }
            ["tcgen05", "ld", "sync", "aligned", "32x32b", count, "b32"] => {
                let d = self.targets(operand(0)?)?;
                if count.strip_prefix('x').and_then(|count| count.parse().ok()) != Some(d.len()) {
                    return Err(format!("{} registers for .{count}", d.len()));
                }
                let address = self.address(operand(1)?, tensor)?;
                Op::TensorWarp(TensorWarpOp::Load { d, address })
            }
            ["tcgen05", "wait::ld", ..] => Op::TensorWarp(TensorWarpOp::Wait),
            _ => return Ok(None),
        }))
    }
}
