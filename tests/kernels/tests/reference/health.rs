//! Signal, noise and counts of listed elements, and from sums of partials.

use float8_kernels::{Cast, Format, Granularity, Health, InvScale, health_len, reference};
use half::bf16;
use kernel_tests::{HostMatrix, casts};
use test_data::{Random, normal};

/// Loss of a cast of known values.
#[test]
fn counts_are_what_was_put_in() {
    // With scale 1 and e4m3: kept, clamped twice, flushed, exact zeros, not numbers.
    let x = [1.0, 448.0, 1000.0, -449.0, 1e-4, -1e-40, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 2.0];
    let host = HostMatrix {
        codes: x.iter().map(|&x| reference::encode(x, Format::E4m3)).collect(),
        inv_scales: vec![InvScale::new(1.0)],
        shape: [3, 4],
        format: Format::E4m3,
        granularity: Granularity::Tensor,
    };
    let got = reference::health(&x, &host.view());
    assert_eq!((got.elements, got.saturated, got.flushed, got.non_finite), (12, 4, 2, 3));
    let close = |got: f64, want: f64| (got - want).abs() <= 1e-12 * want;
    assert!(close(got.signal, 1.0 + 448f64.powi(2) + 1e6 + 449f64.powi(2) + 1e-8 + 4.0), "{got:?}");
    assert!(close(got.noise, 552f64.powi(2) + 1.0 + 1e-8), "{got:?}");
    assert_eq!((got.saturated_share(), got.flushed_share()), (4.0 / 12.0, 2.0 / 12.0));
}

/// A tensor's own amax never counts as saturated, for any rounding of scale and inverse.
#[test]
fn the_amax_is_not_saturated() {
    let mut random = Random::new(72);
    let x: Vec<f32> = (0..20_000).map(|_| f32::from_bits(random.bits() % 0x7f80_0000)).collect();
    for cast in casts().filter(|cast| cast.granularity == Granularity::Row) {
        let host = HostMatrix::cast(&x, [x.len(), 1], cast);
        assert_eq!(reference::health(&x, &host.view()).saturated, 0, "{cast:?}");
    }
}

/// torchao requires 25 dB of a cast. Normal inputs keep more at every granularity: a mantissa bit
/// is 6 dB.
#[test]
fn casts_keep_25_db() {
    let shape = [256, 512];
    let x = normal(shape[0] * shape[1], 73);
    let rounded: Vec<_> = x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    for (x, cast) in [x, rounded].iter().flat_map(|x| casts().map(move |cast| (x, cast))) {
        let got = reference::health(x, &HostMatrix::cast(x, shape, cast).view()).sqnr_db().expect("signal and noise");
        let floor = match cast {
            // OCP's exponent saturates the largest elements of some blocks.
            Cast { format: Format::E4m3, granularity: Granularity::Block1x32, .. } => 30.0,
            Cast { format: Format::E4m3, .. } => 31.0,
            Cast { format: Format::E5m2, .. } => 25.0,
        };
        assert!(got >= floor, "{cast:?}: {got} dB");
    }
}

#[test]
fn ratios_without_noise_or_signal() {
    let health = |signal, noise| Health { signal, noise, ..Health::default() };
    assert_eq!(health(100.0, 1.0).sqnr_db(), Some(20.0));
    assert_eq!(health(1.0, 0.0).sqnr_db(), Some(f64::INFINITY));
    for (signal, noise) in [(0.0, 0.0), (0.0, 1.0), (f64::INFINITY, 1.0), (1.0, f64::INFINITY), (f64::NAN, 1.0)] {
        assert_eq!(health(signal, noise).sqnr_db(), None, "{signal} {noise}");
    }
    assert_eq!(Health::default().saturated_share(), 0.0);
    let partials = [1.0, 0.25, 3.0, 4.0, 5.0, 2.0, 0.5, 6.0, 7.0, 8.0];
    let want = Health { elements: 9, signal: 3.0, noise: 0.75, saturated: 9, flushed: 11, non_finite: 13 };
    assert_eq!(Health::from_partials(9, &partials), want);
}

#[test]
fn partials_cover_at_most_a_million_elements() {
    for (rows, k) in [(1, 1), (1, 1 << 21), (1 << 16, 1 << 14), ((1 << 16) - 1, (1 << 16) - 17), (1 << 30, 3)] {
        let (len, quads) = (health_len(rows, k), rows * k.div_ceil(4));
        // Rounds of the units of all partials.
        assert!(len > 0 && quads.div_ceil(len * 256) * 256 * 4 <= 1 << 20, "[{rows}, {k}]: {len}");
    }
    assert_eq!(health_len(1, 1), 1);
}
