//! The scalar reference against torch's casts and torchao's scales, codes and values, bit for bit.

use float8_kernels::{Cast, Format, reference};
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
        let CastVector { name, x, shape: shape @ [rows, cols], cast, transposed, .. } = &vector;
        let (x, shape) = if *transposed { (transpose(x, *shape), [*cols, *rows]) } else { (x.clone(), *shape) };
        let ours = match vector.amax {
            None => HostMatrix::cast(&x, shape, *cast),
            Some(amax) => {
                let Cast { format, granularity, scale_mode } = *cast;
                let scale = reference::amax_to_scale(amax, format, scale_mode);
                let one_by_one: Vec<_> = x.iter().map(|x| reference::encode(*x * scale.get(), format)).collect();
                // The compiler vectorizes whole slices.
                let mut codes = vec![0; x.len()];
                reference::cast(&x, scale, format, &mut codes);
                assert!(codes == one_by_one, "{name}");
                HostMatrix { codes, inv_scales: vec![scale.inverse()], shape, format, granularity }
            }
        };
        vector.check(&ours).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        if let Some(values) = &vector.values {
            let value = |(i, code): (usize, &u8)| {
                reference::decode(*code, cast.format) * ours.view().inv_scale(i / shape[1], i % shape[1])
            };
            assert_same(&ours.codes.iter().enumerate().map(value).collect::<Vec<_>>(), values, name);
        }
    }
}
