//! Reproducible stream of random bits and values.

/// Marsaglia's 64-bit xorshift, which returns the upper half.
pub struct Random(u64);

impl Random {
    /// Stream that depends only on the seed.
    pub fn new(seed: u64) -> Self {
        // Seed 0 would leave a state of one bit, which takes dozens of steps to spread.
        let seed = if seed == 0 { u64::MAX } else { seed };
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns 32 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// Integer in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.bits()) * n as u64) >> 32) as usize
    }

    /// Value in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Value of either sign whose magnitude spreads over a dozen binades, like activations and
    /// gradients.
    pub fn value(&mut self) -> f32 {
        self.unit() * (self.unit() * 6.0).exp2()
    }

    /// `len` values of [`value`](Self::value).
    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    /// Values with zeros, subnormals, infinities and NaNs of both signs, on average `every`
    /// elements apart.
    pub fn spiced(&mut self, len: usize, every: usize) -> Vec<f32> {
        const SPICE: [f32; 6] = [0.0, f32::MIN_POSITIVE / 3.0, 1e-30, 3e38, f32::INFINITY, f32::NAN];
        let spiced = |random: &mut Self| SPICE[random.below(SPICE.len())].copysign(random.unit());
        (0..len).map(|_| if self.below(every) == 0 { spiced(self) } else { self.value() }).collect()
    }
}

/// `n` approximately normal values: sums of twelve uniform ones.
pub fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut uniform = || (random.bits() >> 8) as f32 / (1u64 << 24) as f32;
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams of consecutive seeds are uncorrelated; moments match the distributions.
    #[test]
    fn streams_are_spread() {
        for seed in 0..20 {
            let x = normal(10_000, seed);
            let mean = x.iter().sum::<f32>() / 1e4;
            let variance = x.iter().map(|x| x * x).sum::<f32>() / 1e4;
            assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.1, "{seed}: {mean}, {variance}");
            let other = normal(10_000, seed + 1);
            let covariance = x.iter().zip(&other).map(|(x, y)| x * y).sum::<f32>() / 1e4;
            assert!(covariance.abs() < 0.05, "{seed}: {covariance}");
            let mut random = Random::new(seed);
            let mut counts = [0; 7];
            (0..7000).for_each(|_| counts[random.below(7)] += 1);
            assert!(counts.iter().all(|count| (800..1200).contains(count)), "{seed}: {counts:?}");
        }
    }
}
