//! The scalar reference against torch's casts and torchao's scales, codes and values, bit for bit.

use float8_kernels::{Format, reference};
use kernel_tests::{CastVector, Goldens, HostMatrix};
use test_data::{Golden, same, transpose};

fn assert_same(ours: &[f32], golden: &[f32], what: &str) {
    assert!(ours.len() == golden.len() && ours.iter().zip(golden).all(|(a, b)| same(*a, *b)), "{what}");
}

#[test]
fn golden_decodes_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    for format in Format::ALL {
        let ours: Vec<_> = (0..=255).map(|code| reference::decode(code, format)).collect();
        assert_same(&ours, &golden.floats(&format!("{format}_decode")), &format.to_string());
    }
}

#[test]
fn golden_casts_of_the_reference() {
    for vector in Goldens::open().vectors() {
        let shape = vector.shape();
        let CastVector { name, x, cast, amax, transposed, want, values, .. } = vector;
        let x = if transposed { transpose(&x, shape) } else { x };
        let ours = match amax {
            None => HostMatrix::cast(&x, want.shape, cast),
            Some(amax) => HostMatrix::cast_by(amax, &x, want.shape, cast),
        };
        ours.must_be(&want).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        if let Some(values) = values {
            assert_same(&ours.values(), &values, &name);
        }
    }
}
