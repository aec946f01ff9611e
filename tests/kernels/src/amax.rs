//! amax for every dtype, layout and content, with the largest element at the ends and in the
//! middle.

use cubecl::prelude::*;
use float8_kernels::{MatrixView, amax, reference};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{BF16, Content, DTYPES, F32};
use crate::device::{Layout, must_be, poison, read_f32, upload};
use crate::input::{Input, LARGE, SHAPES, far_places};

/// More elements than the units of the largest grid take in one step.
const MANY_STEPS: [usize; 2] = [1031, 2051];

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for input in inputs(all) {
        all.add(format!("amax {input}"), |client| check(client, input));
    }
    for input in peaks() {
        let Input { shape: [rows, cols], dtype, layout, .. } = input;
        all.add(format!("amax {rows}x{cols} {dtype} {layout} peak"), |client| check_peaks(client, input));
    }
}

fn inputs<R: Runtime>(all: &Cases<'_, R>) -> Vec<Input> {
    let mut inputs: Vec<_> = all.sizes(&SHAPES, &LARGE).into_iter().map(|shape| Input::new(shape, BF16)).collect();
    for dtype in DTYPES {
        inputs.extend(Layout::ALL.map(|layout| Input { layout, ..Input::new([70, 133], dtype) }));
        let new = Input::new([37, 140], dtype);
        inputs.extend(Content::ALL.map(|content| Input { content, ..new }));
        // NaN wins over infinity in every layout.
        inputs.extend(Layout::ALL[1..].iter().map(|&layout| Input { layout, content: Content::Ends, ..new }));
    }
    let repeated = Layout::repeated().into_iter().zip([[50, 3], [3, 50], [5, 7]]);
    inputs.extend(repeated.map(|(layout, shape)| Input { layout, ..Input::new(shape, F32) }));
    inputs
}

fn peaks() -> Vec<Input> {
    let kinds = || DTYPES.into_iter().flat_map(|dtype| Layout::ALL.map(|layout| (dtype, layout)));
    let small = SHAPES.into_iter().flat_map(|shape| kinds().map(move |(dtype, layout)| (shape, dtype, layout)));
    let large = [Layout::RowMajor, Layout::Pitched].map(|layout| (MANY_STEPS, F32, layout));
    small.chain(large).map(|(shape, dtype, layout)| Input { layout, ..Input::new(shape, dtype) }).collect()
}

fn check_view<R: Runtime>(client: &ComputeClient<R>, view: &MatrixView, want: f32) -> Result<(), Failure> {
    poison(client, &[4; 4])?;
    must_be(&read_f32(client, amax(client, view)?)?, &[want], 1)
}

fn check<R: Runtime>(client: &ComputeClient<R>, input: Input) -> Result<f64, Failure> {
    let (view, x) = input.upload(client, 11);
    check_view(client, &view, reference::amax(&x))?;
    Ok(0.0)
}

/// Equal elements except one, which is the amax.
fn check_peaks<R: Runtime>(client: &ComputeClient<R>, input: Input) -> Result<f64, Failure> {
    let Input { shape, dtype, layout, .. } = input;
    let mut x = vec![0.5; shape[0] * shape[1]];
    for (i, place) in far_places(shape).into_iter().enumerate() {
        x[place] = [-2.0, f32::NEG_INFINITY, -2.5, f32::NAN, 3.0][i];
        let (view, _) = upload(client, &x, shape, layout, dtype);
        check_view(client, &view, x[place].abs()).map_err(|failure| wrong!("at {place}: {failure}"))?;
        x[place] = 0.5;
    }
    Ok(0.0)
}
