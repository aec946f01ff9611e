//! What the tests multiply and cast: a reproducible stream of numbers.

/// A stream of bits (Knuth's MMIX generator, high half).
pub struct Random(pub u64);

impl Random {
    /// The next 32 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    /// In [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A value, over many binades.
    pub fn value(&mut self) -> f32 {
        self.unit() * (self.unit() * 6.0).exp2()
    }
}
