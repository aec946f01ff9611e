//! Health of every dtype, layout and content, against the reference.

use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, Health, MatrixView, Operand, Orientation, ScaleMode, health, health_len, quantize,
    reference,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::cast::{casts, describe};
use crate::data::{BF16, Content, DTYPES, F32, Random, transpose};
use crate::device::{Layout, flip, poison, read_f32};
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
    for case in cases(all) {
        let Case { input, cast } = case;
        all.add(format!("health {input} {}", describe(cast)), |client| check(client, &case));
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
            // Sums are f32: squares of huge values overflow there but not on the host.
            if !matches!(content, Content::Spiced | Content::Huge) {
                add(Input { content, ..Input::new([37, 140], dtype) }, Format::E4m3);
            }
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
    // Each element is the amax of its row.
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

/// Health of `operand`, a cast of `x`.
fn measure<R: Runtime>(client: &ComputeClient<R>, x: &MatrixView, operand: &Operand) -> Result<Health, Failure> {
    let rows = health_len(operand.rows, operand.k);
    poison(client, &[rows * FIELDS * 4; 2])?;
    let partials = read_f32(client, health(client, x, operand)?)?;
    if partials.len() != rows * FIELDS {
        return Err(wrong!("{} partial sums, not {rows} rows", partials.len()));
    }
    Ok(Health::from_partials((operand.rows * operand.k) as u64, &partials))
}

/// Checks both copies. The reference uses the codes and scales read from the device.
fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case) -> Result<f64, Failure> {
    let &Case { input, cast } = case;
    let (view, x) = input.upload(client, 11);
    let done = quantize(client, &view, cast, Orientation::Both)?;
    let flipped = transpose(&x, input.shape);
    let mut worst = 0f64;
    for (operand, view, x) in [(done.rows, view.clone(), x), (done.cols, flip(&view), flipped)] {
        let Some(operand) = operand else { return Err(wrong!("a copy is missing")) };
        let got = measure(client, &view, &operand)?;
        if input.content == Content::Bits {
            // Squares of these values overflow f32. A value that is its own amax does not saturate,
            // however scale and inverse are rounded.
            let by_rows = operand.k == 1;
            if by_rows && got.saturated > 0 {
                return Err(wrong!("{} saturated of {}", got.saturated, got.elements));
            }
            continue;
        }
        let want = reference::health(&x, &HostMatrix::read(client, &operand)?.view());
        worst = worst.max(compare(&got, &want)?);
    }
    Ok(worst)
}

/// Compares counts exactly, signal within f32 summation, and noise within the rounding of `x̂`.
fn compare(got: &Health, want: &Health) -> Result<f64, Failure> {
    let counts = |health: &Health| (health.elements, health.saturated, health.flushed, health.non_finite);
    // Squares of f32 subnormals and of values near them are lost.
    let tiny = 1e-36 * want.elements as f64;
    let share = |got: f64, want: f64, slack: f64| (got - want).abs() / (1e-4 * want + slack);
    let signal = share(got.signal, want.signal, tiny);
    let noise = share(got.noise, want.noise, 1e-12 * want.signal + tiny);
    // A NaN fails these comparisons too.
    if counts(got) == counts(want) && signal <= 1.0 && noise <= 1.0 {
        Ok(signal.max(noise))
    } else {
        Err(wrong!("{got:?}, not {want:?}"))
    }
}
