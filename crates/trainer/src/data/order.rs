//! Order of an epoch: a permutation of `0..count` that depends only on seed and epoch and is never
//! held in memory.

use crate::rng::Rng;

/// Enough rounds for a Feistel network to look random (Luby and Rackoff prove it for 4 rounds of
/// ideal functions).
const ROUNDS: usize = 6;

/// Pseudo-random permutation of `0..count`.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    pub(super) fn new(count: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let mut rng = Rng::named(seed, "order of an epoch");
        let mut rng = Rng::new(rng.next_u64() ^ Rng::new(epoch).next_u64());
        let keys = core::array::from_fn(|_| rng.next_u64());
        Self { count, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// Element of `0..count` that is visited at `index`.
    pub(super) fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        // The network permutes a range up to four times larger. Walking its cycle until a value is
        // below `count` gives a permutation of `0..count`.
        let mut value = self.network(index);
        while value >= self.count {
            value = self.network(value);
        }
        value
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (Rng::new(key ^ right).next_u64() & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::Permutation;

    #[test]
    fn visits_everything_once() {
        for count in (1..200).chain([1000, 4096, 4097]) {
            let order = Permutation::new(count, 7, count % 5);
            let mut seen: Vec<u64> = (0..count).map(|index| order.at(index)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn depends_on_seed_and_epoch() {
        let order = |seed, epoch| (0..50).map(|i| Permutation::new(50, seed, epoch).at(i)).collect::<Vec<_>>();
        assert_eq!(order(1, 2), order(1, 2));
        let all = [order(1, 2), order(2, 1), order(1, 3), order(2, 2), order(0, 0)];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
            assert_ne!(a, &(0..50).collect::<Vec<_>>());
        }
    }

    #[test]
    fn orders_are_fixed() {
        let order = Permutation::new(10, 7, 2);
        assert_eq!((0..10).map(|i| order.at(i)).collect::<Vec<_>>(), [1, 0, 8, 4, 2, 3, 6, 5, 7, 9]);
    }

    /// The position of a sequence is uniform over epochs: each of 8 positions about 1/8 of the
    /// time.
    #[test]
    fn is_uniform() {
        let mut counts = [[0; 8]; 8];
        for epoch in 0..4000 {
            let order = Permutation::new(8, 3, epoch);
            (0..8).for_each(|i| counts[i as usize][order.at(i) as usize] += 1);
        }
        assert!(counts.iter().flatten().all(|count| (400..600).contains(count)), "{counts:?}");
    }

    #[test]
    fn as_many_sequences_as_there_can_be() {
        let order = Permutation::new(u64::MAX / 5, 1, 1);
        let places: Vec<_> = (0..100).map(|i| order.at(i)).collect();
        assert!(places.iter().all(|place| *place < u64::MAX / 5));
    }
}
