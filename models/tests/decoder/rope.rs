//! Rotary frequencies and the rotation against f64.

use models::rope::RotaryEmbedding;
use std::f64::consts::TAU;

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use models::rotary_frequencies;
use models::{DecoderConfig, RopeScaling};

use crate::common::{llama3_scaling, tiny_with, values};

/// transformers' `_compute_llama3_parameters`, by wavelengths.
fn scaled(frequency: f64, scaling: &RopeScaling) -> f64 {
    let length = scaling.original_max_position_embeddings as f64;
    let wavelength = TAU / frequency;
    if wavelength > length / scaling.low_freq_factor {
        return frequency / scaling.factor;
    }
    if wavelength < length / scaling.high_freq_factor {
        return frequency;
    }
    let smooth = (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
    (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
}

#[test]
fn frequencies_follow_the_formula() {
    for scaling in [None, Some(llama3_scaling()), Some(RopeScaling { factor: 32.0, ..llama3_scaling() })] {
        let config = DecoderConfig {
            rope_scaling: scaling,
            ..tiny_with(|dims| {
                dims.head_dim = 128;
                dims.rope_theta = 500_000.0
            })
        };
        let frequencies = rotary_frequencies(&config);
        assert_eq!(frequencies.len(), 64);
        let mut regions = [0; 3];
        for (i, &frequency) in frequencies.iter().enumerate() {
            let plain = 500_000_f64.powf(-(2.0 * i as f64) / 128.0);
            let expected = scaling.map_or(plain, |scaling| scaled(plain, &scaling));
            assert!((f64::from(frequency) - expected).abs() <= 1e-6 * expected, "{i}: {frequency} {expected}");
            let ratio = expected / plain;
            regions[if ratio > 0.999_999 {
                0
            } else if ratio * scaling.unwrap().factor < 1.000_001 {
                1
            } else {
                2
            }] += 1;
        }
        assert!(scaling.is_none() || regions.iter().all(|&n| n > 0), "all three regions: {regions:?}");
    }
}

/// An angle is a product in f32, as when the published weights were trained. At far positions it
/// differs from the f64 product.
#[test]
fn angles_at_far_positions_are_rounded_to_f32() {
    let config = tiny_with(|dims| {
        dims.head_dim = 8;
        dims.rope_theta = 500_000.0
    });
    let rope = RotaryEmbedding::<Flex>::new(rotary_frequencies(&config), config.dims.max_seq_len, &Default::default());
    let frequencies = rotary_frequencies(&config);
    // Ones in the first half: the first half of the output is the cosines, the second the sines.
    let x = || Tensor::from_data(TensorData::new([[1_f32; 4], [0.0; 4]].concat(), [1, 1, 1, 8]), &Default::default());
    let mut differ = 0;
    for position in [100_003, 131_071, 1_000_003] {
        let y = values(rope.at(position..position + 1).rotate(x()));
        for (i, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            assert_eq!([y[i], y[i + 4]], [angle.cos() as f32, angle.sin() as f32], "position {position}, {i}");
            let exact = position as f64 * f64::from(*frequency);
            differ += usize::from((exact.cos() as f32, exact.sin() as f32) != (y[i], y[i + 4]));
        }
    }
    assert!(differ > 0, "no angle is rounded");
}
