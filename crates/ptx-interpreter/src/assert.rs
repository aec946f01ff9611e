//! `__assertfail`, which CUDA's `assert` calls when it fails.

use super::operand::{Addr, Space};
use super::state::{Cluster, Machine, Warp, read};

/// Message, file, line, function and bytes of a character: the bytes of each parameter.
pub(crate) const PARAMS: [usize; 5] = [8, 8, 4, 8, 8];

impl Machine<'_> {
    /// What the call says in a lane.
    pub(crate) fn failed_assertion(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        warp: &mut Warp,
        params: &[Addr; 5],
        lane: usize,
    ) -> Result<String, String> {
        let mut values = [0; 5];
        for (i, (param, bytes)) in params.iter().zip(PARAMS).enumerate() {
            let at = (param.space, warp.address(param, lane), lane);
            let from = self.locate(cluster, rank, warp, at, bytes, false)?;
            // SAFETY: located.
            values[i] = unsafe { read(from, bytes) };
        }
        let [message, file, line, function, size] = values;
        if size != 1 {
            return Err(format!("an assertion with characters of {size} bytes"));
        }
        let mut text = |address: u64| -> Result<String, String> {
            let mut bytes = vec![];
            loop {
                let at = (Space::Generic, address + bytes.len() as u64, lane);
                let from = self.locate(cluster, rank, warp, at, 1, false)?;
                // SAFETY: located.
                match unsafe { read(from, 1) } {
                    0 => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
                    byte => bytes.push(byte as u8),
                }
            }
        };
        let [message, file, function] = [text(message)?, text(file)?, text(function)?];
        Ok(format!("{file}:{line}: {function}: lane {lane}: assertion `{message}` failed"))
    }
}
