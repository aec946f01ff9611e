//! Casts of every dtype, format, scale and orientation, from every layout, of every shape and content.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Operand, Orientation, Quantized, Scale, quantize, quantize_with_amax,
    reference, row_words,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{BF16, Content, DTYPES, same, to_dtype, transpose};
use crate::device::{Layout, poison, read_f32, upload, upload_f32};
use crate::matrix::{FORMATS, GRANULARITIES, HostMatrix, modes};

pub(crate) const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];

/// Around the words of 4, the padding to 16, and tiles of 64 and 128.
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 5], [17, 33], [64, 64], [1, 1000], [1000, 1], [129, 257], [66, 128], [128, 132]];

/// Long rows, long columns, many tiles, and the sizes of Llama.
const LARGE: [[usize; 2]; 9] = [
    [1, 100_003],
    [100_003, 1],
    [5, 40_000],
    [1031, 2051],
    [2048, 4096],
    [4100, 3080],
    [257, 14_336],
    [14_336, 130],
    [4096, 8192],
];

/// A matrix, how it lies and how it is cast.
#[derive(Clone, Copy)]
struct Case {
    shape: [usize; 2],
    dtype: StorageType,
    layout: Layout,
    content: Content,
    cast: Cast,
    orientation: Orientation,
}

impl Case {
    fn new(shape: [usize; 2], cast: Cast) -> Self {
        let (layout, content) = (Layout::RowMajor, Content::Values);
        Self { shape, dtype: BF16, layout, content, cast, orientation: Orientation::Both }
    }

    fn name(&self, kernel: &str) -> String {
        let Self { shape: [rows, cols], dtype, layout, content, cast, orientation } = self;
        let Cast { format, granularity, scale_mode } = cast;
        format!(
            "{kernel} {rows}x{cols} {dtype} {layout} {content} {format} {granularity} {scale_mode:?} {orientation:?}"
        )
    }
}

pub(crate) fn casts() -> impl Iterator<Item = Cast> {
    let pairs = FORMATS.into_iter().flat_map(|format| GRANULARITIES.map(|granularity| (format, granularity)));
    pairs.flat_map(|(format, granularity)| {
        modes(granularity).iter().map(move |&scale_mode| Cast { format, granularity, scale_mode })
    })
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases(all) {
        all.add(case.name("quantize"), |client| check(client, &case));
    }
    for case in given_cases() {
        for observe in [false, true] {
            let name = format!("{} {}", case.name("quantize_with_amax"), if observe { "observed" } else { "given" });
            all.add(name, |client| check_given(client, &case, observe));
        }
    }
}

fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Case> {
    let mut cases = vec![];
    // Every kernel there is.
    for dtype in DTYPES {
        for cast in casts() {
            for orientation in ORIENTATIONS {
                cases.push(Case { dtype, orientation, ..Case::new([37, 140], cast) });
            }
        }
    }
    let by_granularity = |granularity| Cast { format: Format::E4m3, granularity, scale_mode: modes(granularity)[0] };
    for shape in all.sizes(&SHAPES, &LARGE) {
        for cast in GRANULARITIES.map(by_granularity) {
            cases.push(Case::new(shape, cast));
            if cast.granularity == Granularity::Row {
                cases.push(Case { orientation: Orientation::Rows, ..Case::new(shape, cast) });
            }
        }
    }
    for layout in &Layout::ALL[1..] {
        for dtype in DTYPES {
            for cast in GRANULARITIES.map(by_granularity) {
                cases.push(Case { layout: *layout, dtype, ..Case::new([70, 133], cast) });
            }
        }
    }
    for content in &Content::ALL[1..] {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            for (j, format) in FORMATS.into_iter().enumerate() {
                for (l, granularity) in GRANULARITIES.into_iter().enumerate() {
                    // Scale modes in turn: what differs between them is tested above.
                    let modes = modes(granularity);
                    let cast = Cast { format, granularity, scale_mode: modes[(i + j + l) % modes.len()] };
                    cases.push(Case { content: *content, dtype, ..Case::new([35, 150], cast) });
                }
            }
        }
    }
    cases
}

/// Tensorwise casts; the amax that each gets follows from its place in the list.
fn given_cases() -> Vec<Case> {
    let mut cases = vec![];
    for dtype in DTYPES {
        for cast in casts().filter(|cast| cast.granularity == Granularity::Tensor) {
            for (layout, orientation) in Layout::ALL.into_iter().zip(ORIENTATIONS.into_iter().cycle()) {
                cases.push(Case { dtype, layout, orientation, ..Case::new([70, 133], cast) });
            }
        }
    }
    cases
}

/// Fills what a cast of `x [rows, cols]` will allocate with NaN.
fn poison_copies<R: Runtime>(client: &ComputeClient<R>, [rows, cols]: [usize; 2], cast: Cast) -> Result<(), Failure> {
    let scales = |rows, k| cast.granularity.scale_words(rows, k) * 4;
    let codes = |rows, k| rows * row_words(k) * 4;
    let bytes = [codes(rows, cols), codes(cols, rows), scales(rows, cols), scales(cols, rows)];
    poison(client, &[&bytes[..], &bytes[2..], &[4; 6]].concat())
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case) -> Result<f64, Failure> {
    let &Case { shape: [rows, cols], dtype, layout, content, cast, orientation } = case;
    let x = content.fill(rows * cols, dtype, 21);
    let view = upload(client, &x, case.shape, layout, dtype);
    let x = to_dtype(&x, dtype).1;
    poison_copies(client, case.shape, cast)?;
    let done = quantize(client, &view, cast, orientation)?;
    let amax = read_f32(client, done.amax.clone())?;
    check_copies(client, done, case, |transposed| {
        let want = reference::quantize(&x, rows, cols, cast, transposed);
        (want.codes, want.scales)
    })?;
    check_amax(&amax, &x, case)
}

fn check_amax(amax: &[f32], x: &[f32], case: &Case) -> Result<f64, Failure> {
    let &Case { shape: [rows, cols], cast: Cast { granularity, .. }, orientation, .. } = case;
    let len = granularity.amax_len(rows, cols, orientation);
    if amax.len() != len {
        return Err(wrong!("{} maxima, not {len}", amax.len()));
    }
    let (got, want) = (reference::amax(amax), reference::amax(x));
    if !same(got, want) {
        return Err(wrong!("amax {got:e}, not {want:e}"));
    }
    if granularity == Granularity::Row {
        let (x, k) = if orientation.rows() { (x.to_vec(), cols) } else { (transpose(x, [rows, cols]), rows) };
        for (i, (&got, row)) in amax.iter().zip(x.chunks(k)).enumerate() {
            let want = reference::amax(row);
            if !same(got, want) {
                return Err(wrong!("amax of row {i}: {got:e}, not {want:e}"));
            }
        }
    }
    Ok(0.0)
}

/// Compares each copy with the codes, in the layout of x, and scales that `want` gives for it.
fn check_copies<R: Runtime>(
    client: &ComputeClient<R>,
    done: Quantized,
    case: &Case,
    want: impl Fn(bool) -> (Vec<u8>, Vec<Scale>),
) -> Result<(), Failure> {
    let &Case { shape, cast, orientation, .. } = case;
    for (operand, wanted, transposed) in [(done.rows, orientation.rows(), false), (done.cols, orientation.cols(), true)]
    {
        let what = if transposed { "by columns" } else { "by rows" };
        match operand {
            Some(operand) if wanted => {
                let (codes, scales) = want(transposed);
                check_copy(client, &operand, codes, &scales, shape, cast, transposed)
                    .map_err(|failure| wrong!("{what}: {failure}"))?;
            }
            None if !wanted => {}
            operand => return Err(wrong!("a copy {what}: {}, asked for: {wanted}", operand.is_some())),
        }
    }
    Ok(())
}

fn check_copy<R: Runtime>(
    client: &ComputeClient<R>,
    operand: &Operand,
    codes: Vec<u8>,
    scales: &[Scale],
    shape: [usize; 2],
    cast: Cast,
    transposed: bool,
) -> Result<(), Failure> {
    let (shape, codes) = if transposed { ([shape[1], shape[0]], transpose(&codes, shape)) } else { (shape, codes) };
    let got = HostMatrix::read(client, operand)?;
    if (got.shape, got.format, got.granularity) != (shape, cast.format, cast.granularity) {
        return Err(wrong!("{:?} {} {}", got.shape, got.format, got.granularity));
    }
    for (i, (got, want)) in got.inv_scales.iter().zip(scales).enumerate() {
        let want = want.inverse();
        if !same(got.get(), want.get()) {
            return Err(wrong!("inverse scale {i} is {:e}, not {:e}", got.get(), want.get()));
        }
    }
    let differ = got.codes.iter().zip(&codes).filter(|(got, want)| got != want).count();
    if let Some(i) = got.codes.iter().zip(&codes).position(|(got, want)| got != want) {
        let (row, col) = (i / shape[1], i % shape[1]);
        return Err(wrong!("code [{row}, {col}] is {:#x}, not {:#x}; {differ} differ", got.codes[i], codes[i]));
    }
    Ok(())
}

fn check_given<R: Runtime>(client: &ComputeClient<R>, case: &Case, observe: bool) -> Result<f64, Failure> {
    let &Case { shape, dtype, layout, content, cast, orientation } = case;
    let x = content.fill(shape[0] * shape[1], dtype, 60);
    let view: MatrixView = upload(client, &x, shape, layout, dtype);
    let x = to_dtype(&x, dtype).1;
    // Below, at and above the amax of x, and what has no scale of its own.
    let given = [0.1, reference::amax(&x), 1e4, 0.0, f32::INFINITY, f32::NAN][layout as usize];
    let scale = reference::amax_to_scale(given, cast.format, cast.scale_mode);
    let mut codes = vec![0; x.len()];
    reference::cast(&x, scale, cast.format, &mut codes);

    poison_copies(client, shape, cast)?;
    let amax = upload_f32(client, &[given]);
    let done = quantize_with_amax(client, &view, &amax, observe, cast, orientation)?;
    let got = read_f32(client, done.amax.clone())?;
    check_copies(client, done, case, |_| (codes.clone(), vec![scale]))?;
    let want = if observe { reference::amax(&x) } else { given };
    if got.len() != 1 || !same(got[0], want) {
        return Err(wrong!("amax {got:?}, not {want:e}"));
    }
    Ok(0.0)
}

/// The shapes of [`run`].
pub(crate) fn shapes<R: Runtime>(all: &Cases<'_, R>) -> Vec<[usize; 2]> {
    all.sizes(&SHAPES, &LARGE)
}
