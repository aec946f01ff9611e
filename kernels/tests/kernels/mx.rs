//! OCP MX: the scales of every kind of amax, the tiles, and the errors.

use float8_kernels::reference::{self, HostOperand};
use float8_kernels::{
    Cast, Format, Granularity, InvScale, KernelError, Orientation, ScaleCalculationMode, ScaleMode, mx, quantize,
    quantize_with_amax,
};
use rstest::rstest;

use crate::common::*;
use crate::reference::e8m0_scale;

fn mx_cast(format: Format, mode: ScaleCalculationMode) -> Cast {
    Cast { format, granularity: Granularity::Block1x32, scale_mode: ScaleMode::E8m0(mode) }
}

fn bytes(scales: &[InvScale]) -> Vec<u8> {
    scales.iter().map(|scale| scale.to_e8m0().expect("a power of two or NaN")).collect()
}

/// Every binade's ends, the neighbours of FMAX and of 1 in it, subnormals, and amaxes at random.
fn amaxes() -> Vec<f32> {
    let mantissas = [0x0, 0x1, 0x3f_ffff, 0x40_0000, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x60_0002, 0x6f_ffff, 0x70_0000];
    let ends = (0..255u32).flat_map(|e| mantissas.map(|m| f32::from_bits(e << 23 | m)));
    let mut random = Random::new(90);
    let others = (0..2000).map(|_| f32::from_bits(random.bits() % 0x7f80_0000));
    let last = [0x77_ffff, 0x78_0000, 0x7f_ffff].map(|m| f32::from_bits(0x7f00_0000 | m));
    ends.chain(others).chain(last).chain([f32::INFINITY, f32::NAN]).collect()
}

/// The reference against logarithms in f64, and the device against the reference, for blocks whose amax is each of them, with
/// their codes, which are subnormal products for some.
#[rstest]
fn scales_of_every_amax(
    #[values(Format::E4m3, Format::E5m2)] format: Format,
    #[values(
        ScaleCalculationMode::Floor,
        ScaleCalculationMode::Ceil,
        ScaleCalculationMode::Even,
        ScaleCalculationMode::Rceil
    )]
    mode: ScaleCalculationMode,
) {
    let amaxes = amaxes();
    let cast = mx_cast(format, mode);
    for &amax in &amaxes {
        let got = reference::amax_to_scale(amax, format, cast.scale_mode).get();
        let want = e8m0_scale(amax, format, mode);
        assert!(same(got, want), "{format} {mode} {amax:e}: {got:e}, not {want:e}");
        if amax.is_finite() && matches!(mode, ScaleCalculationMode::Ceil) {
            assert!(got.is_nan() || amax * got <= format.max(), "{amax:e} saturates");
        }
    }
    let Some(client) = client() else { return };
    // The amax, and the same halved again and again.
    let x: Vec<f32> = amaxes.iter().flat_map(|&amax| (0..32).map(move |i| amax * 0.5f32.powi(i))).collect();
    let shape = [amaxes.len(), 32];
    let view = upload(&client, &x, shape, Layout::RowMajor, F32);
    let got = HostMatrix::read(&client, &quantize(&client, &view, cast, Orientation::Rows).unwrap().rows.unwrap());
    let want = reference::quantize(&x, shape[0], shape[1], cast, false);
    for (i, amax) in amaxes.iter().enumerate() {
        let (got_scale, want_scale) = (got.inv_scales[i].get(), want.scales[i].inverse().get());
        assert!(same(got_scale, want_scale), "{format} {mode} {amax:e}: {got_scale:e}, not {want_scale:e}");
        let block = i * 32..(i + 1) * 32;
        assert_eq!(got.codes[block.clone()], want.codes[block], "{format} {mode} {amax:e}");
    }
}

/// A block that is not finite is NaN as a whole, its neighbours are as they were.
#[test]
fn blocks_that_are_not_finite() {
    let (rows, cols) = (3, 100);
    let mut x = Random::new(91).values(rows * cols);
    x[cols + 40] = f32::INFINITY;
    x[2 * cols + 99] = f32::NAN;
    for mode in ScaleCalculationMode::ALL {
        let made = reference::quantize(&x, rows, cols, mx_cast(Format::E4m3, mode), false);
        for (i, &code) in made.codes.iter().enumerate() {
            let block = (i / cols, i % cols / 32);
            let is_nan = reference::decode(code, Format::E4m3).is_nan();
            assert_eq!(is_nan, block == (1, 1) || block == (2, 3), "{mode} {block:?}");
        }
    }
}

/// `Floor` saturates what `Rceil` does not, for the same amax.
#[test]
fn modes_differ_where_they_should() {
    let health = |mode| {
        let x = vec![500.0f32; 32];
        let made = reference::quantize(&x, 1, 32, mx_cast(Format::E4m3, mode), false);
        let inv_scales: Vec<_> = made.scales.iter().map(|s| s.inverse()).collect();
        let operand = HostOperand {
            codes: &made.codes,
            rows: 1,
            k: 32,
            format: Format::E4m3,
            granularity: Granularity::Block1x32,
            inv_scales: &inv_scales,
        };
        (bytes(&inv_scales)[0], reference::health(&x, &operand).saturated)
    };
    assert_eq!(health(ScaleCalculationMode::Floor), (127, 32));
    assert_eq!(health(ScaleCalculationMode::Even), (128, 0));
    assert_eq!(health(ScaleCalculationMode::Ceil), (128, 0));
    assert_eq!(health(ScaleCalculationMode::Rceil), (128, 0));
}

#[test]
fn scales_in_tiles_are_padded() {
    let Some(client) = client() else { return };
    for shape in [[1, 1], [129, 33], [128, 128], [130, 260]] {
        let x = vec![1.0; shape[0] * shape[1]];
        let view = upload(&client, &x, shape, Layout::RowMajor, BF16);
        let cast = mx_cast(Format::E4m3, ScaleCalculationMode::Floor);
        let made = quantize(&client, &view, cast, Orientation::Both).unwrap();
        for operand in [made.rows.unwrap(), made.cols.unwrap()] {
            sync(&client);
            let tiles = client.read_one(operand.inv_scale.clone()).unwrap();
            assert_eq!(tiles.len(), 4 * operand.granularity.scale_words(operand.rows, operand.k));
            let blocks = operand.k.div_ceil(32);
            // 2^-8 in every block.
            assert_eq!(mx::to_blocked(&vec![119; operand.rows * blocks], operand.rows, blocks), tiles.to_vec());
        }
    }
}

#[test]
fn modes_that_do_not_fit() {
    let Some(client) = client() else { return };
    let view = upload(&client, &[1.0; 6], [2, 3], Layout::RowMajor, F32);
    let e8m0 = ScaleMode::E8m0(ScaleCalculationMode::Rceil);
    for (granularity, scale_mode) in
        [(Granularity::Block1x32, ScaleMode::F32), (Granularity::Tensor, e8m0), (Granularity::Block1x128, e8m0)]
    {
        let cast = Cast { format: Format::E4m3, granularity, scale_mode };
        let error = quantize(&client, &view, cast, Orientation::Rows).unwrap_err();
        assert_eq!(error, KernelError::ScaleModeMismatch { granularity, scale_mode });
        for word in [granularity.to_string(), scale_mode.to_string()] {
            assert!(error.to_string().contains(&word), "{error}");
        }
    }
    let one = upload_f32(&client, &[1.0]);
    let error = quantize_with_amax(&client, &view, &one, false, tensorwise(Format::E4m3, e8m0), Orientation::Rows);
    let want = KernelError::ScaleModeMismatch { granularity: Granularity::Tensor, scale_mode: e8m0 };
    assert_eq!(error.unwrap_err(), want);
}
