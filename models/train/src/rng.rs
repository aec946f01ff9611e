//! A small seeded generator, so that weights and batches are the same on every device and at every thread count.

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that depends on nothing but `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator for one named purpose: streams of different names are independent.
    pub fn named(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, then mixed with the seed.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = Self(seed);
        Self(rng.next_u64() ^ hash)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in 0..n.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "no number is below 0");
        // The bias of the multiply-shift is n / 2^64.
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// Normal with mean 0 and standard deviation 1, redrawn while beyond `limit` standard deviations.
    pub fn truncated_normal(&mut self, limit: f64) -> f64 {
        loop {
            // Box-Muller; 1 - u is in (0, 1], so the logarithm is finite.
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            let value = radius * (std::f64::consts::TAU * self.uniform()).cos();
            if value.abs() <= limit {
                return value;
            }
        }
    }
}
