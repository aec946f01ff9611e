//! Health of every dtype, layout and content, against the reference.

use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, Health, MatrixView, Orientation, ScaleMode, health, health_len, quantize, reference,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::cast::{casts, describe};
use crate::data::{BF16, Content, DTYPES, F32, Random, transpose};
use crate::device::{Layout, poison, read_f32};
use crate::input::{Input, LARGE, SHAPES};
use crate::matrix::{HostMatrix, modes};

/// Numbers in a row of partial sums.
const FIELDS: usize = 5;

/// Number of random matrices and casts.
const ANY: u64 = 24;

/// A matrix and its cast.
#[derive(Clone, Copy)]
struct Case {
    input: Input,
    cast: Cast,
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for Case { input, cast } in cases(all) {
        all.add(format!("health {input} {}", describe(cast)), |client| check(client, input, cast));
    }
}

fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Case> {
    let cast = |format, granularity| Cast { format, granularity, scale_mode: modes(granularity)[0] };
    let mut cases = vec![];
    let mut add = |input, format| {
        cases.extend(Granularity::ALL.map(|granularity| Case { input, cast: cast(format, granularity) }));
    };
    for shape in all.sizes(&SHAPES, &LARGE) {
        add(Input::new(shape, BF16), Format::E4m3);
    }
    for dtype in DTYPES {
        for layout in Layout::ALL {
            add(Input { layout, ..Input::new([70, 133], dtype) }, Format::E4m3);
        }
        for content in Content::ALL {
            add(Input { content, ..Input::new([37, 140], dtype) }, Format::E4m3);
        }
        // Several partial sums, whole vectors, and one long row.
        for (shape, format) in Format::ALL.into_iter().flat_map(|format| [([130, 260], format), ([1, 5000], format)]) {
            add(Input { content: Content::Mild, ..Input::new(shape, dtype) }, format);
        }
    }
    // Many steps of the largest grid.
    let input = Input { content: Content::Ends, ..Input::new([1031, 4103], F32) };
    let scale_mode = ScaleMode::PowerOfTwo;
    cases.push(Case { input, cast: Cast { scale_mode, ..cast(Format::E5m2, Granularity::Block1x128) } });
    // Each element is the amax of its row: none saturates, however scale and inverse are rounded.
    for cast in casts().filter(|cast| cast.granularity == Granularity::Row) {
        cases.push(Case { input: Input { content: Content::Bits, ..Input::new([20_000, 1], F32) }, cast });
    }
    cases.extend((0..ANY).map(any_case));
    cases
}

fn any_case(seed: u64) -> Case {
    let random = &mut Random::new(2000 + seed);
    let casts: Vec<_> = casts().collect();
    let shape = [1 + random.below(200), 1 + random.below(300)];
    let input = Input { content: Content::Mild, ..Input::new(shape, F32) };
    Case { input, cast: casts[random.below(casts.len())] }
}

/// Checks both copies. The reference uses the codes and scales read from the device.
fn check<R: Runtime>(client: &ComputeClient<R>, input: Input, cast: Cast) -> Result<f64, Failure> {
    let (view, x) = input.upload(client, 11);
    let done = quantize(client, &view, cast, Orientation::Both)?;
    let flipped = transpose(&x, input.shape);
    let ([rows, cols], [row, col]) = (view.shape, view.strides);
    let of_cols = MatrixView { shape: [cols, rows], strides: [col, row], ..view.clone() };
    let mut worst = 0f64;
    for (operand, view, x) in [(done.rows, view, x), (done.cols, of_cols, flipped)] {
        let Some(operand) = operand else { return Err(wrong!("a copy is missing")) };
        let len = health_len(operand.rows, operand.k) * FIELDS;
        poison(client, &[len * 4; 2])?;
        let partials = read_f32(client, health(client, &view, &operand)?)?;
        if partials.len() != len {
            return Err(wrong!("{} partial sums, not {len}", partials.len()));
        }
        let got = Health::from_partials(x.len() as u64, &partials);
        worst = worst.max(compare(&got, &reference::health(&x, &HostMatrix::read(client, &operand)?.view()))?);
    }
    Ok(worst)
}

/// Compares counts exactly, signal within f32 summation, and noise within the rounding of `x̂`.
fn compare(got: &Health, want: &Health) -> Result<f64, Failure> {
    let counts = |health: &Health| (health.elements, health.saturated, health.flushed, health.non_finite);
    // Squares of f32 subnormals and of values near them are lost, and squares of huge values overflow.
    let tiny = 1e-36 * want.elements as f64;
    let share = |got: f64, want: f64, slack: f64| match want {
        1e37.. => 0.0,
        _ => (got - want).abs() / (1e-4 * want + slack),
    };
    let signal = share(got.signal, want.signal, tiny);
    let noise = share(got.noise, want.noise, 1e-12 * want.signal + tiny);
    // A NaN fails them too, except beside a sum that overflows.
    if counts(got) == counts(want) && signal <= 1.0 && noise <= 1.0 {
        Ok(signal.max(noise))
    } else {
        Err(wrong!("{got:?}, not {want:?}"))
    }
}
