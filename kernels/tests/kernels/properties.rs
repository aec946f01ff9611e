//! What holds for any shape, stride, dtype, granularity and value.

use float8_kernels::{Cast, Granularity, MatrixView, Orientation, Quantized, ScaleMode, quantize, reference};
use proptest::prelude::*;
use proptest::sample::select;

use crate::common::*;
use crate::oracle::Nearest;
use crate::quantize::check;

fn any_orientation() -> impl Strategy<Value = Orientation> {
    select(vec![Orientation::Rows, Orientation::Cols, Orientation::Both])
}

fn flipped(view: &MatrixView) -> MatrixView {
    let (mut view, [rows, cols], [row, col]) = (view.clone(), view.shape, view.strides);
    view.shape = [cols, rows];
    view.strides = [col, row];
    view
}

proptest! {
    /// Decoding what was encoded gives the nearest value, and again the same code.
    #[test]
    fn encoding_is_idempotent_and_nearest(bits: u32) {
        let x = f32::from_bits(bits);
        for format in FORMATS {
            let code = reference::encode(x, format);
            prop_assert_eq!(code, Nearest::new(format).encode(x));
            prop_assert_eq!(reference::encode(reference::decode(code, format), format), code);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any strides, any base, either order of the axes.
    #[test]
    fn any_cast_of_any_view_is_the_reference(
        rows in 1usize..280,
        cols in 1usize..280,
        col_stride in 1usize..4,
        gap in 0usize..9,
        offset in 0usize..70,
        transposed: bool,
        dtype in select(vec![F32, F16, BF16]),
        cast in any_cast(),
        orientation in any_orientation(),
        every in select(vec![20usize, 300, 5000]),
        seed: u64,
    ) {
        let Some(client) = client() else { return Ok(()) };
        let mut strides = [(cols - 1) * col_stride + 1 + gap, col_stride];
        let mut shape = [rows, cols];
        let len = offset + (rows - 1) * strides[0] + (cols - 1) * strides[1] + 1;
        let (bytes, memory) = to_dtype(&Random::new(seed).spiced(len, every), dtype);
        if transposed {
            strides.swap(0, 1);
            shape.swap(0, 1);
        }
        let x: Vec<f32> = (0..shape[0])
            .flat_map(|r| (0..shape[1]).map(move |c| offset + r * strides[0] + c * strides[1]))
            .map(|i| memory[i])
            .collect();
        let handle = client.create_from_slice(&bytes).offset_start((offset * bytes.len() / len) as u64);
        check(&client, &MatrixView { handle, shape, strides, dtype }, &x, cast, orientation);
    }

    /// The copy by columns is the copy by rows of the transpose, and where groups are the same in both orientations it is
    /// the transpose of the copy by rows.
    #[test]
    fn transposed_copies(rows in 1usize..280, cols in 1usize..280, cast in any_cast(), seed: u64) {
        let Some(client) = client() else { return Ok(()) };
        let shape = [rows, cols];
        let view = upload(&client, &Random::new(seed).values(rows * cols), shape, Layout::RowMajor, F32);
        let read = |operand: Option<_>| HostMatrix::read(&client, &operand.unwrap());
        let Quantized { rows: by_rows, cols: by_cols, .. } =
            quantize(&client, &view, cast, Orientation::Both).unwrap();
        let (by_rows, by_cols) = (read(by_rows), read(by_cols));
        // A copy of the transpose, so that the kernel reads it row by row.
        let other = upload(&client, &transpose(&Random::new(seed).values(rows * cols), shape), [cols, rows], Layout::RowMajor, F32);
        for other in [other, flipped(&view)] {
            let other = read(quantize(&client, &other, cast, Orientation::Rows).unwrap().rows);
            prop_assert_eq!(&by_cols.codes, &other.codes);
            prop_assert_eq!(&by_cols.inv_scales, &other.inv_scales);
        }
        if matches!(cast.granularity, Granularity::Tensor | Granularity::Block128x128) {
            prop_assert_eq!(&by_cols.codes, &transpose(&by_rows.codes, shape));
            let dims = cast.granularity.scale_dims(rows, cols);
            prop_assert_eq!(&by_cols.inv_scales, &transpose(&by_rows.inv_scales, dims));
        }
    }

    /// Rows in another order give the same rows of codes and the same scales in that order.
    #[test]
    fn rows_do_not_know_each_other(
        rows in 2usize..200,
        cols in 1usize..280,
        granularity in select(vec![Granularity::Row, Granularity::Block1x128]),
        orientation in select(vec![Orientation::Rows, Orientation::Both]),
        seed: u64,
    ) {
        let Some(client) = client() else { return Ok(()) };
        let mut random = Random::new(seed);
        let x = random.spiced(rows * cols, 200);
        let mut order: Vec<usize> = (0..rows).collect();
        for i in (1..rows).rev() {
            order.swap(i, random.bits() as usize % (i + 1));
        }
        let cast = Cast { granularity, ..tensorwise(FORMATS[0], ScaleMode::F32) };
        let cast = |x: &[f32]| {
            let view = upload(&client, x, [rows, cols], Layout::RowMajor, F32);
            HostMatrix::read(&client, &quantize(&client, &view, cast, orientation).unwrap().rows.unwrap())
        };
        let straight = cast(&x);
        let shuffled: Vec<f32> = order.iter().flat_map(|&r| x[r * cols..][..cols].iter().copied()).collect();
        let shuffled = cast(&shuffled);
        let scales = granularity.scale_dims(rows, cols)[1];
        for (i, &r) in order.iter().enumerate() {
            prop_assert_eq!(&shuffled.codes[i * cols..][..cols], &straight.codes[r * cols..][..cols]);
            for s in 0..scales {
                let (got, want) = (shuffled.inv_scales[i * scales + s], straight.inv_scales[r * scales + s]);
                prop_assert!(same(got.get(), want.get()));
            }
        }
    }
}
