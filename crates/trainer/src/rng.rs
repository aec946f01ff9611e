//! Small seeded generator. Weights and batches are the same on every device and for every number of
//! threads.

use rayon::prelude::*;

/// Trials per core at a time, and maximum number of such chunks at once.
const TRIALS: usize = 1 << 16;
const AT_ONCE: usize = 256;
/// Increment of SplitMix64.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Generator that depends only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Generator for a named purpose. Streams of different names are independent.
    pub fn named(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, then mixed with the seed.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = Self(seed);
        Self(rng.next_u64() ^ hash)
    }

    /// Generator after skipping `numbers` numbers.
    pub fn after(self, numbers: u64) -> Self {
        Self(self.0.wrapping_add(GAMMA.wrapping_mul(numbers)))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
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

    /// Normal with mean 0 and standard deviation 1, redrawn while beyond `limit` standard
    /// deviations.
    pub fn truncated_normal(&mut self, limit: f64) -> f64 {
        loop {
            let value = self.normal();
            if value.abs() <= limit {
                return value;
            }
        }
    }

    /// Next `count` values of [`truncated_normal`](Self::truncated_normal), mapped by `map`: the
    /// same values, drawn on all cores. Not generic, so that the loops are optimized with this
    /// crate's settings.
    pub fn truncated_normals(self, limit: f64, count: usize, map: &(dyn Fn(f64) -> f32 + Sync)) -> Vec<f32> {
        let (mut values, mut tried) = (Vec::with_capacity(count), 0);
        while values.len() < count {
            let left = count - values.len();
            // About one of 370 is redrawn at three standard deviations.
            let trials = TRIALS.min(left + left / 256 + 16);
            let chunks = left.div_ceil(trials).min(AT_ONCE);
            let draw = |chunk: usize| -> Vec<f32> {
                // Each trial takes two numbers, so the start of a chunk is known.
                let before = 2 * (tried + chunk * trials) as u64;
                let mut rng = self.clone().after(before);
                let drawn = (0..trials).map(|_| rng.normal()).filter(|value| value.abs() <= limit);
                drawn.map(map).collect()
            };
            let drawn: Vec<_> = (0..chunks).into_par_iter().map(draw).collect();
            values.extend(drawn.into_iter().flatten().take(left));
            tried += chunks * trials;
        }
        values
    }

    /// Normal with mean 0 and standard deviation 1.
    fn normal(&mut self) -> f64 {
        // Box-Muller; 1 - u is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts beyond one round, so that redrawn values shift all later ones.
    #[test]
    fn values_drawn_on_all_cores_are_those_drawn_one_by_one() {
        for count in [0, 1, 7, TRIALS + 1, AT_ONCE * TRIALS + 3] {
            let mut one = Rng::named(3, "weights");
            let all = one.clone().truncated_normals(3.0, count, &|value| value as f32);
            let expected = (0..count).map(|_| one.truncated_normal(3.0) as f32);
            assert!(all.iter().map(|value| value.to_bits()).eq(expected.map(f32::to_bits)), "{count}");
        }
    }
}
