//! f32 values at which casts and scales can be wrong.

use crate::Random;

/// Edge cases of an encoder, of both signs. They include each of the `values` of a format (finite,
/// not negative, ascending), each midpoint of two, and their f32 neighbours. Then zeros,
/// subnormals, the ends of f32, infinities and NaNs.
pub fn encoder_edges(values: &[f64]) -> Vec<f32> {
    let mut points = values.to_vec();
    points.extend(values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0));
    // The value after the largest, if it existed, and the midpoint to it.
    let step = values[values.len() - 1] - values[values.len() - 2];
    points.extend([step / 2.0, step].map(|step| step + values[values.len() - 1]));
    let around = |point: f64| [point as f32, (point as f32).next_up(), (point as f32).next_down()];
    let mut edges: Vec<f32> = points.into_iter().flat_map(around).collect();
    edges.extend([f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x007f_ffff), f32::MAX]);
    edges.extend([f32::INFINITY, f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0x7fff_ffff)]);
    edges.iter().flat_map(|&x| [x, -x]).collect()
}

/// Edge cases of amaxes for quotients and their powers of two, and `random` others from 1e-12 up.
pub fn amaxes(random: usize, seed: u64) -> Vec<f32> {
    let eps = 1e-12f32;
    let mut x = vec![0.0, 448.0, 57344.0, 1.0, 1.5, 1.75, 1.75f32.next_up(), 1.75f32.next_down(), 3.5, 7.0, 0.875];
    x.extend([eps, eps.next_up(), eps.next_down(), 9.9e-13, 1.1e-12, f32::MIN_POSITIVE, f32::from_bits(1), 1e-40]);
    x.extend([f32::MAX, f32::MAX.next_down(), 1e38, f32::INFINITY, f32::NAN]);
    x.extend((-39..=127).flat_map(|e| {
        let power = 2f32.powi(e);
        [power, power.next_up(), power.next_down()]
    }));
    let (low, high) = (eps.to_bits(), f32::MAX.to_bits());
    let mut stream = Random::new(seed);
    x.extend((0..random).map(|_| f32::from_bits(low + stream.bits() % (high - low))));
    x
}

/// Edge cases of amaxes for exponents: the ends of every binade, and in each the neighbours of 1,
/// 448 and 57344. Their mantissas are 0, 0.75 and 0.75. Then subnormals and `random` others.
pub fn binade_edges(random: usize, seed: u64) -> Vec<f32> {
    let mantissas = [0x0, 0x1, 0x3f_ffff, 0x40_0000, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x60_0002, 0x6f_ffff, 0x70_0000];
    let edges = (0..255u32).flat_map(|e| mantissas.map(|m| f32::from_bits(e << 23 | m)));
    let last = [0x77_ffff, 0x78_0000, 0x7f_ffff].map(|m| f32::from_bits(0x7f00_0000 | m));
    let mut stream = Random::new(seed);
    let others = (0..random).map(|_| f32::from_bits(stream.bits() % 0x7f80_0000));
    edges.chain(last).chain([f32::INFINITY, f32::NAN]).chain(others).collect()
}
