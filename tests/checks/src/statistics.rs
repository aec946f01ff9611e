//! amax and health of every dtype, layout and content.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, Health, MatrixView, Orientation, amax, health, health_len, quantize, reference,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::cast::shapes;
use crate::data::{BF16, Content, DTYPES, same, to_dtype, transpose};
use crate::device::{Layout, flip, poison, read_f32, upload};
use crate::matrix::{GRANULARITIES, HostMatrix, modes};

/// Numbers in a row of health's partial sums.
const FIELDS: usize = 5;

/// A matrix and how it lies.
#[derive(Clone, Copy)]
struct Case {
    shape: [usize; 2],
    dtype: StorageType,
    layout: Layout,
    content: Content,
}

impl Case {
    fn name(&self, kernel: &str) -> String {
        let Self { shape: [rows, cols], dtype, layout, content } = self;
        format!("{kernel} {rows}x{cols} {dtype} {layout} {content}")
    }

    /// The matrix on the device, and the same values on the host.
    fn upload<R: Runtime>(&self, client: &ComputeClient<R>) -> (MatrixView, Vec<f32>) {
        let &Self { shape, dtype, layout, content } = self;
        let x = content.fill(shape[0] * shape[1], dtype, 11);
        (upload(client, &x, shape, layout, dtype), to_dtype(&x, dtype).1)
    }
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases(all) {
        all.add(case.name("amax"), |client| check_amax(client, &case));
        // The sums of health are f32: squares of huge values overflow there and not on the host.
        if matches!(case.content, Content::Spiced | Content::Huge) {
            continue;
        }
        for granularity in GRANULARITIES {
            let name = format!("{} {granularity}", case.name("health"));
            all.add(name, |client| check_health(client, &case, granularity));
        }
    }
}

fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Case> {
    let (layout, content) = (Layout::RowMajor, Content::Values);
    let new = |shape, dtype| Case { shape, dtype, layout, content };
    let mut cases: Vec<_> = shapes(all).into_iter().map(|shape| new(shape, BF16)).collect();
    for dtype in DTYPES {
        cases.extend(Layout::ALL.map(|layout| Case { layout, ..new([70, 133], dtype) }));
        cases.extend(Content::ALL.map(|content| Case { content, ..new([37, 140], dtype) }));
    }
    cases
}

fn check_amax<R: Runtime>(client: &ComputeClient<R>, case: &Case) -> Result<f64, Failure> {
    let (view, x) = case.upload(client);
    poison(client, &[4; 4])?;
    let got = read_f32(client, amax(client, &view)?)?;
    let want = reference::amax(&x);
    if got.len() == 1 && same(got[0], want) { Ok(0.0) } else { Err(wrong!("{got:?}, not {want:e}")) }
}

/// Both copies of the matrix, as they are on the device.
fn check_health<R: Runtime>(client: &ComputeClient<R>, case: &Case, granularity: Granularity) -> Result<f64, Failure> {
    let (view, x) = case.upload(client);
    let cast = Cast { format: Format::E4m3, granularity, scale_mode: modes(granularity)[0] };
    let done = quantize(client, &view, cast, Orientation::Both)?;
    let flipped = transpose(&x, case.shape);
    let mut worst = 0f64;
    for (operand, view, x) in [(done.rows, view.clone(), x), (done.cols, flip(&view), flipped)] {
        let Some(operand) = operand else { return Err(wrong!("a copy is missing")) };
        let host = HostMatrix::read(client, &operand)?;
        let rows = health_len(operand.rows, operand.k);
        poison(client, &[rows * FIELDS * 4; 2])?;
        let partials = read_f32(client, health(client, &view, &operand)?)?;
        if partials.len() != rows * FIELDS {
            return Err(wrong!("{} partial sums, not {rows} rows", partials.len()));
        }
        let got = Health::from_partials(x.len() as u64, &partials);
        worst = worst.max(compare(&got, &reference::health(&x, &host.view()))?);
    }
    Ok(worst)
}

/// Equal counts; sums of squares within f32 summation, and noise within the rounding of `x̂`.
fn compare(got: &Health, want: &Health) -> Result<f64, Failure> {
    let counts = |health: &Health| (health.elements, health.saturated, health.flushed, health.non_finite);
    // Squares of f32 subnormals and of values near them are lost.
    let tiny = 1e-36 * want.elements as f64;
    let share = |got: f64, want: f64, slack: f64| (got - want).abs() / (1e-4 * want + slack);
    let signal = share(got.signal, want.signal, tiny);
    let noise = share(got.noise, want.noise, 1e-12 * want.signal + tiny);
    // Not so for NaN either.
    if counts(got) == counts(want) && signal <= 1.0 && noise <= 1.0 {
        Ok(signal.max(noise))
    } else {
        Err(wrong!("{got:?}, not {want:?}"))
    }
}
