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
    let (both, mut cases) = (Orientation::Both, vec![]);
    let mut add = |input, cast, orientation| cases.push(Case { input, cast, orientation });
    let first = |format, granularity| Cast { format, granularity, scale_mode: modes(granularity)[0] };
    let by_granularity = Granularity::ALL.map(|granularity| first(Format::E4m3, granularity));

    // Every kernel, for rows that are no whole vectors of 16-bit floats, and for many blocks in
    // both memory orders.
    for orientation in ORIENTATIONS {
        for cast in casts() {
            DTYPES.into_iter().for_each(|dtype| add(Input::new([37, 140], dtype), cast, orientation));
            for layout in [Layout::RowMajor, Layout::ColumnMajor] {
                add(Input { layout, ..Input::new([70, 300], F32) }, cast, orientation);
            }
        }
    }
    for shape in SHAPES {
        for (dtype, layout) in DTYPES.into_iter().flat_map(|dtype| Layout::ALL.map(|layout| (dtype, layout))) {
            for (cast, orientation) in by_granularity.into_iter().flat_map(|cast| ORIENTATIONS.map(|o| (cast, o))) {
                add(Input { layout, ..Input::new(shape, dtype) }, cast, orientation);
            }
        }
    }
    for shape in all.sizes(&[], &LARGE) {
        by_granularity.into_iter().for_each(|cast| add(Input::new(shape, BF16), cast, both));
        add(Input::new(shape, BF16), by_granularity[1], Orientation::Rows);
    }
    for content in &Content::ALL[1..] {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            for (j, format) in Format::ALL.into_iter().enumerate() {
                for (l, granularity) in Granularity::ALL.into_iter().enumerate() {
                    // Scale modes in turn: the first loop tests the differences between them.
                    let modes = modes(granularity);
                    let cast = Cast { format, granularity, scale_mode: modes[(i + j + l) % modes.len()] };
                    add(Input { content: *content, ..Input::new([35, 150], dtype) }, cast, both);
                }
            }
        }
    }
    // More than one block along both axes: a value that is not finite affects only its own block.
    for (dtype, format) in [F32, BF16].into_iter().flat_map(|dtype| Format::ALL.map(|format| (dtype, format))) {
        for granularity in Granularity::ALL {
            add(Input { content: Content::Ends, ..Input::new([139, 261], dtype) }, first(format, granularity), both);
        }
    }
    for cast in casts() {
        for layout in [Layout::RowMajor, Layout::ColumnMajor] {
            add(Input { layout, content: Content::Constants, ..Input::new([6, 300], F32) }, cast, both);
        }
    }
    for shape in LENGTHS {
        for layout in [Layout::RowMajor, Layout::Pitched, Layout::ColumnMajor] {
            for orientation in [Orientation::Rows, both] {
                let input = Input { layout, content: Content::Peaks, ..Input::new(shape, F32) };
                add(input, by_granularity[1], orientation);
            }
        }
    }
    for (layout, shape) in Layout::REPEATED.into_iter().zip([[140, 150], [150, 140], [5, 7]]) {
        for granularity in Granularity::ALL {
            let cast = Cast { scale_mode: modes(granularity)[1], ..first(Format::E5m2, granularity) };
            add(Input { layout, ..Input::new(shape, F32) }, cast, both);
        }
    }
    for (shape, granularity, orientation) in FOLDED {
        add(Input { content: Content::Peaks, ..Input::new(shape, F32) }, first(Format::E4m3, granularity), orientation);
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
