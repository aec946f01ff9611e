//! Matrices and casts to check: every variant of the cast kernels, and edges of shape, layout and
//! content.

use cubecl::prelude::*;
use float8_kernels::{Cast, Format, Granularity, Orientation};

use super::{Case, ORIENTATIONS, casts};
use crate::case::Cases;
use crate::data::{BF16, Content, DTYPES, F32, Random};
use crate::device::Layout;
use crate::input::{Input, LARGE, SHAPES};
use crate::matrix::modes;

/// Row lengths on both sides of every change in how a row is split among units. The last ones are
/// too long for registers.
const LENGTHS: [[usize; 2]; 13] = [
    [70, 16],
    [70, 17],
    [67, 128],
    [67, 129],
    [19, 512],
    [19, 513],
    [3, 4096],
    [3, 4097],
    [2, 8192],
    [2, 8193],
    [2, 16_384],
    [2, 16_385],
    [3, 40_003],
];

/// Limit of WebGPU on the cubes along one dimension of a grid.
const GRID: usize = 65_535;

/// Shapes that need more than [`GRID`] cubes.
///
/// In order: tiles of 128 by 128; 64 f32 columns a cube, for maxima and casts by columns; 64 rows a
/// cube.
const FOLDED: [([usize; 2], Granularity, Orientation); 3] = [
    ([1, GRID * 128 + 129], Granularity::Block128x128, Orientation::Rows),
    ([1, GRID * 64 + 33], Granularity::Row, Orientation::Cols),
    ([GRID * 64 + 33, 1], Granularity::Row, Orientation::Rows),
];

/// Number of views with random shape, strides and offset.
const VIEWS: u64 = 64;

pub(super) fn quantize<R: Runtime>(all: &Cases<'_, R>) -> Vec<Case> {
    let mut cases = vec![];
    let mut add = |inputs: &[Input], casts: &[Cast], orientations: &[Orientation]| {
        for (&input, &cast) in inputs.iter().flat_map(|input| casts.iter().map(move |cast| (input, cast))) {
            cases.extend(orientations.iter().map(|&orientation| Case { input, cast, orientation }));
        }
    };
    let layouts = |input, all: &[Layout]| all.iter().map(|&layout| Input { layout, ..input }).collect::<Vec<_>>();
    let first = |format, granularity| Cast { format, granularity, scale_mode: modes(granularity)[0] };
    let by_granularity = Granularity::ALL.map(|granularity| first(Format::E4m3, granularity));
    let (every, rowwise, both) = (casts().collect::<Vec<_>>(), &by_granularity[1..2], &[Orientation::Both]);
    let orders = [Layout::RowMajor, Layout::ColumnMajor];

    // Every kernel, for rows that are no whole vectors of 16-bit floats, and for many blocks in
    // both memory orders.
    add(&DTYPES.map(|dtype| Input::new([37, 140], dtype)), &every, &ORIENTATIONS);
    add(&layouts(Input::new([70, 300], F32), &orders), &every, &ORIENTATIONS);
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| DTYPES.map(|dtype| (shape, dtype))) {
        add(&layouts(Input::new(shape, dtype), &Layout::ALL), &by_granularity, &ORIENTATIONS);
    }
    for shape in all.sizes(&[], &LARGE) {
        add(&[Input::new(shape, BF16)], &by_granularity, both);
        add(&[Input::new(shape, BF16)], rowwise, &[Orientation::Rows]);
    }
    for (i, dtype) in DTYPES.into_iter().enumerate() {
        for (j, format) in Format::ALL.into_iter().enumerate() {
            // Scale modes in turn: the first calls test the differences between them.
            let in_turn = Granularity::ALL.into_iter().enumerate().map(|(l, granularity)| {
                let modes = modes(granularity);
                Cast { format, granularity, scale_mode: modes[(i + j + l) % modes.len()] }
            });
            let inputs = Content::ALL.map(|content| Input { content, ..Input::new([35, 150], dtype) });
            add(&inputs[1..], &in_turn.collect::<Vec<_>>(), both);
        }
    }
    // More than one block along both axes: a value that is not finite affects only its own block.
    for (dtype, format) in [F32, BF16].into_iter().flat_map(|dtype| Format::ALL.map(|format| (dtype, format))) {
        let casts = Granularity::ALL.map(|granularity| first(format, granularity));
        add(&[Input { content: Content::Ends, ..Input::new([139, 261], dtype) }], &casts, both);
    }
    add(&layouts(Input { content: Content::Constants, ..Input::new([6, 300], F32) }, &orders), &every, both);
    for shape in LENGTHS {
        let input = Input { content: Content::Peaks, ..Input::new(shape, F32) };
        let inputs = layouts(input, &[Layout::RowMajor, Layout::Pitched, Layout::ColumnMajor]);
        add(&inputs, rowwise, &[Orientation::Rows, Orientation::Both]);
    }
    for (layout, shape) in Layout::repeated().into_iter().zip([[140, 150], [150, 140], [5, 7]]) {
        let second = |granularity| Cast { scale_mode: modes(granularity)[1], ..first(Format::E5m2, granularity) };
        add(&[Input { layout, ..Input::new(shape, F32) }], &Granularity::ALL.map(second), both);
    }
    for (shape, granularity, orientation) in FOLDED {
        let input = Input { content: Content::Peaks, ..Input::new(shape, F32) };
        add(&[input], &[first(Format::E4m3, granularity)], &[orientation]);
    }
    cases.extend((0..VIEWS).map(any_view));
    cases
}

/// A random cast of a random view. Either axis may have the smaller stride.
fn any_view(seed: u64) -> Case {
    let random = &mut Random::new(1000 + seed);
    let casts: Vec<_> = casts().collect();
    let [rows, cols] = [1 + random.below(280), 1 + random.below(280)];
    let near = 1 + random.below(3);
    let far = (cols - 1) * near + 1 + random.below(9);
    let (shape, strides) = if random.below(2) == 0 { ([rows, cols], [far, near]) } else { ([cols, rows], [near, far]) };
    let input = Input {
        shape,
        dtype: DTYPES[random.below(3)],
        layout: Layout::Strided { offset: random.below(70), strides },
        content: [Content::Values, Content::Spiced, Content::OneNan][random.below(3)],
    };
    Case { input, cast: casts[random.below(casts.len())], orientation: ORIENTATIONS[random.below(3)] }
}
