//! Quality of a cast, computed on the host in f64.

use super::{HostOperand, decode, magnitude};
use crate::Health;
use crate::format::F32_INF;
use crate::health::saturation_limit;

/// Quality of `operand` as a cast of `x [rows, k]`.
///
/// # Panics
/// If `x`, the codes or the scales do not have the length of the operand's shape.
pub fn health(x: &[f32], operand: &HostOperand<'_>) -> Health {
    let &HostOperand { rows, k, format, .. } = operand;
    operand.assert_lengths();
    assert_eq!(x.len(), rows * k, "health: x is not [{rows}, {k}]");
    let mut health = Health { elements: x.len() as u64, ..Health::default() };
    for row in 0..rows {
        for col in 0..k {
            let (x, code) = (x[row * k + col], operand.codes[row * k + col]);
            let inv_scale = operand.inv_scale(row, col);
            let mag = magnitude(x) as u32;
            let restored = decode(code, format) * inv_scale;
            if x.is_finite() && restored.is_finite() {
                health.signal += f64::from(x) * f64::from(x);
                health.noise += (f64::from(x) - f64::from(restored)).powi(2);
            } else {
                health.non_finite += 1;
            }
            health.saturated +=
                u64::from(mag == F32_INF || (mag < F32_INF && mag > saturation_limit(inv_scale, format)));
            health.flushed += u64::from(mag != 0 && code & 0x7f == 0);
        }
    }
    health
}
