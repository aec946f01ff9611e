//! The scalar reference against torch's casts and torchao's scales, codes and values, bit for bit.

use float8_kernels::{Cast, Format, Granularity, InvScale, Scale, ScaleCalculationMode, ScaleMode, mx, reference};
use test_data::{Golden, transpose};

const MODES: [(&str, ScaleMode); 2] = [("", ScaleMode::F32), ("_pow2", ScaleMode::PowerOfTwo)];

/// Bits, every NaN being one.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// A NaN's code is one for all, as a GPU's conversion has it; the file's, made on a CPU, keep signs.
fn assert_codes(ours: &[u8], golden: &[u8], input: &[f32], format: Format, what: &str) {
    assert_eq!(ours.len(), golden.len(), "{what}");
    for ((ours, golden), x) in ours.iter().zip(golden).zip(input) {
        let is_nan = |code| reference::decode(code, format).is_nan();
        let same = if x.is_nan() { *ours == 0x7f && is_nan(*golden) } else { ours == golden };
        assert!(same, "{what}: {x:e} ({:#010x}) casts to {ours:#04x}, golden {golden:#04x}", x.to_bits());
    }
}

/// Value by value, and whole slices, which the compiler vectorizes.
#[test]
fn golden_casts_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    let names = golden.names();
    let casts: Vec<_> = names.iter().filter_map(|name| name.strip_suffix("_codes")?.split_once('_')).collect();
    assert!(!casts.is_empty(), "no casts in the file");
    for (format_name, input_name) in casts {
        let format = Format::ALL.into_iter().find(|format| format.to_string() == format_name);
        let format = format.unwrap_or_else(|| panic!("{format_name}: unknown format"));
        let source = if input_name == "edge" { format!("{format}_edge_in") } else { format!("{input_name}_in") };
        let (name, input) = (format!("{format}_{input_name}_codes"), golden.floats(&source));
        let want = golden.codes(&name);
        let one_by_one: Vec<_> = input.iter().map(|x| reference::encode(*x, format)).collect();
        assert_codes(&one_by_one, &want, &input, format, &name);
        let mut whole = vec![0; input.len()];
        reference::cast(&input, Scale::new(1.0), format, &mut whole);
        assert_codes(&whole, &want, &input, format, &name);
    }
}

#[test]
fn golden_decodes_of_the_reference() {
    let golden = Golden::open("cast.safetensors");
    for format in Format::ALL {
        let ours: Vec<_> = (0..=255).map(|code| reference::decode(code, format)).collect();
        assert_eq!(bits(&ours), bits(&golden.floats(&format!("{format}_decode"))), "{format}");
    }
}

#[test]
fn golden_scales_of_the_reference() {
    let golden = Golden::open("quantize.safetensors");
    let amaxes = golden.floats("amax");
    for format in Format::ALL {
        for (suffix, mode) in MODES {
            let ours: Vec<_> = amaxes.iter().map(|amax| reference::amax_to_scale(*amax, format, mode).get()).collect();
            assert_eq!(bits(&ours), bits(&golden.floats(&format!("{format}_scale{suffix}"))), "{format}{suffix}");
        }
    }
}

/// The copy by rows against torchao's `rowwise`, the copy by columns against its `colwise`, and `tensorwise` against both.
#[test]
fn golden_codes_of_the_reference() {
    let golden = Golden::open("quantize.safetensors");
    let kinds = [
        ("tensorwise", Granularity::Tensor, &[false, true][..]),
        ("rowwise", Granularity::Row, &[false]),
        ("colwise", Granularity::Row, &[true]),
    ];
    let mut compared = 0;
    for dtype in ["f32", "bf16"] {
        let name = format!("x_{dtype}");
        let (x, [rows, cols]) = (golden.floats(&name), golden.matrix(&name));
        for format in Format::ALL {
            for ((kind, granularity, transposed), (suffix, scale_mode)) in
                kinds.into_iter().flat_map(|kind| MODES.map(|mode| (kind, mode)))
            {
                let name = format!("{dtype}_{format}_{kind}{suffix}");
                let cast = Cast { format, granularity, scale_mode };
                for transposed in transposed {
                    let ours = reference::quantize(&x, rows, cols, cast, *transposed);
                    let scales: Vec<_> = ours.scales.iter().map(|scale| scale.get()).collect();
                    assert_eq!(scales, golden.floats(&format!("{name}_scale")), "{name}");
                    assert!(ours.codes == golden.codes(&format!("{name}_codes")), "{name}: codes differ");
                }
                compared += 1;
            }
        }
    }
    let in_file = golden.names().iter().filter(|name| name.ends_with("_codes")).count();
    assert_eq!(compared, in_file, "every cast in the file");
}

/// By rows as the file has it, and by columns of the transpose.
#[test]
fn golden_mx_of_the_reference() {
    let golden = Golden::open("mx.safetensors");
    let mut compared = 0;
    for dtype in ["f32", "bf16"] {
        let name = format!("x_{dtype}");
        let (x, shape @ [rows, k]) = (golden.floats(&name), golden.matrix(&name));
        let flipped = transpose(&x, shape);
        for (format, mode) in
            Format::ALL.into_iter().flat_map(|format| ScaleCalculationMode::ALL.map(|mode| (format, mode)))
        {
            let cast = Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) };
            let name = format!("{dtype}_{format}_{mode}");
            let by_rows = reference::quantize(&x, rows, k, cast, false);
            let mut by_cols = reference::quantize(&flipped, k, rows, cast, true);
            by_cols.codes = transpose(&by_cols.codes, [k, rows]);
            for (ours, how) in [(by_rows, "by rows"), (by_cols, "by columns")] {
                let inverses: Vec<_> = ours.scales.iter().map(|scale| scale.inverse()).collect();
                let scales: Option<Vec<_>> = inverses.iter().map(|scale| scale.to_e8m0()).collect();
                assert_eq!(scales, Some(golden.codes(&format!("{name}_scale"))), "{name} {how}");
                assert!(ours.codes == golden.codes(&format!("{name}_codes")), "{name} {how}: codes");
                let value = |(i, code): (usize, &u8)| {
                    reference::decode(*code, format) * inverses[i / k * k.div_ceil(32) + i % k / 32].get()
                };
                let values: Vec<_> = ours.codes.iter().enumerate().map(value).collect();
                assert!(bits(&values) == bits(&golden.floats(&format!("{name}_dequant"))), "{name} {how}: values");
            }
            compared += 1;
        }
    }
    let in_file = golden.names().iter().filter(|name| name.ends_with("_codes")).count();
    assert_eq!(compared, in_file, "every cast in the file");
}

/// The tiles of the file's scales hold them all, and nothing else.
#[test]
fn golden_scales_survive_tiles() {
    let golden = Golden::open("mx.safetensors");
    let [rows, blocks] = golden.matrix("f32_e4m3_rceil_scale");
    let scales = golden.codes("f32_e4m3_rceil_scale");
    let tiles = mx::to_blocked(&scales, rows, blocks);
    assert_eq!(tiles.len() / 4, Granularity::Block1x32.scale_words(rows, 32 * blocks));
    assert_eq!(mx::from_blocked(&tiles, rows, blocks), scales);
    let back: Vec<_> = scales.iter().map(|&byte| InvScale::from_e8m0(byte).to_e8m0()).collect();
    assert_eq!(back, scales.into_iter().map(Some).collect::<Vec<_>>());
}
