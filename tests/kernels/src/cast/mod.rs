//! Casts of every dtype, format, scale mode and orientation, from every layout, shape and content.

mod cases;
mod encode;
mod given;
mod scale;

use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, Quantized, Scale, quantize, quantize_with_amax, reference,
    row_words,
};

use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::transpose;
use crate::device::{must_be, poison, read_f32, upload_f32};
use crate::input::Input;
use crate::matrix::{HostMatrix, modes};

pub(crate) const ORIENTATIONS: [Orientation; 3] = [Orientation::Rows, Orientation::Cols, Orientation::Both];

/// A matrix and its cast.
#[derive(Clone, Copy)]
struct Case {
    input: Input,
    cast: Cast,
    orientation: Orientation,
}

impl Case {
    fn name(&self, kernel: &str) -> String {
        let Self { input, cast, orientation } = self;
        format!("{kernel} {input} {} {orientation:?}", describe(*cast))
    }
}

/// Text of a cast in case names.
pub(crate) fn describe(Cast { format, granularity, scale_mode }: Cast) -> String {
    format!("{format} {granularity} {scale_mode:?}")
}

/// Every combination of format, granularity and scale mode, with squares of one mode.
pub fn casts() -> impl Iterator<Item = Cast> {
    let pairs = Format::ALL.into_iter().flat_map(|format| Granularity::ALL.map(|granularity| (format, granularity)));
    pairs.flat_map(|(format, granularity)| {
        modes(granularity).iter().map(move |&scale_mode| Cast { format, granularity, scale_mode })
    })
}

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases::quantize(all) {
        all.add(case.name("quantize"), |client| check(client, &case, None));
    }
    scale::add(all);
    given::add(all);
    encode::add(all);
}

/// Fills the memory that a cast of `x [rows, cols]` will allocate with NaN.
fn poison_copies<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, cols]: [usize; 2],
    cast: Cast,
    orientation: Orientation,
) -> Result<(), Failure> {
    let mut bytes = vec![4; 6];
    for (wanted, rows, k) in [(orientation.rows(), rows, cols), (orientation.cols(), cols, rows)] {
        if wanted {
            bytes.extend([rows * row_words(k), cast.granularity.scale_words(rows, k)].map(|words| words * 4));
            bytes.push(cast.granularity.scale_words(rows, k) * 4);
        }
    }
    poison(client, &bytes)
}

/// An amax that the cast does not compute itself.
#[derive(Clone, Copy)]
struct Given {
    /// The amax of x without another one.
    amax: Option<f32>,
    /// Its place in a history of six.
    place: usize,
    /// Whether the cast also observes the amax of x.
    observe: bool,
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case, given: Option<Given>) -> Result<f64, Failure> {
    let (view, x) = case.input.upload(client, 21);
    check_view(client, &view, &x, case.cast, case.orientation, given)?;
    Ok(0.0)
}

/// Casts `view` and compares copies, scales and maxima with the reference. `x` holds the values of
/// `view`, row-major.
fn check_view<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    x: &[f32],
    cast: Cast,
    orientation: Orientation,
    given: Option<Given>,
) -> Result<Quantized, Failure> {
    let shape @ [rows, cols] = view.shape;
    poison_copies(client, shape, cast, orientation)?;
    let Some(Given { amax, place, observe }) = given else {
        let done = quantize(client, view, cast, orientation)?;
        let amax = read_f32(client, done.amax.clone())?;
        check_copies(client, &done, shape, cast, orientation, |transposed| {
            let want = reference::quantize(x, rows, cols, cast, transposed);
            (want.codes, want.scales)
        })?;
        check_amax(&amax, x, shape, cast.granularity, orientation)?;
        return Ok(done);
    };
    let amax = amax.unwrap_or_else(|| reference::amax(x));
    let mut history = [f32::NAN; 6];
    history[place] = amax;
    let handle = upload_f32(client, &history).offset_start(place as u64 * 4);
    let done = quantize_with_amax(client, view, &handle, observe, cast, orientation)?;
    let scale = reference::amax_to_scale(amax, cast.format, cast.scale_mode);
    let mut codes = vec![0; x.len()];
    reference::cast(x, scale, cast.format, &mut codes);
    check_copies(client, &done, shape, cast, orientation, |_| (codes.clone(), vec![scale]))?;
    let got = read_f32(client, done.amax.clone())?;
    must_be(&got[..1], &[if observe { reference::amax(x) } else { amax }], 1)?;
    Ok(done)
}

fn check_amax(
    amax: &[f32],
    x: &[f32],
    shape @ [rows, cols]: [usize; 2],
    granularity: Granularity,
    orientation: Orientation,
) -> Result<(), Failure> {
    let len = granularity.amax_len(rows, cols, orientation);
    if amax.len() != len {
        return Err(wrong!("{} maxima, not {len}", amax.len()));
    }
    must_be(&[reference::amax(amax)], &[reference::amax(x)], 1)?;
    if granularity == Granularity::Row {
        let (x, k) = if orientation.rows() { (x.to_vec(), cols) } else { (transpose(x, shape), rows) };
        let want: Vec<_> = x.chunks(k).map(reference::amax).collect();
        must_be(&amax[..want.len()], &want, 1)?;
    }
    Ok(())
}

/// Compares each copy with the codes and scales from `want`. These codes are in the layout of x.
fn check_copies<R: Runtime>(
    client: &ComputeClient<R>,
    done: &Quantized,
    shape: [usize; 2],
    cast: Cast,
    orientation: Orientation,
    want: impl Fn(bool) -> (Vec<u8>, Vec<Scale>),
) -> Result<(), Failure> {
    for (operand, wanted, transposed) in
        [(&done.rows, orientation.rows(), false), (&done.cols, orientation.cols(), true)]
    {
        let what = if transposed { "by columns" } else { "by rows" };
        match operand {
            Some(operand) if wanted => {
                let (codes, scales) = want(transposed);
                let (shape, codes) =
                    if transposed { ([shape[1], shape[0]], transpose(&codes, shape)) } else { (shape, codes) };
                let inv_scales = scales.iter().map(|scale| scale.inverse()).collect();
                let Cast { format, granularity, .. } = cast;
                let same = HostMatrix::read(client, operand)?.must_be(&HostMatrix {
                    codes,
                    inv_scales,
                    shape,
                    format,
                    granularity,
                });
                same.map_err(|failure| wrong!("{what}: {failure}"))?;
            }
            None if !wanted => {}
            operand => return Err(wrong!("a copy {what}: {}, asked for: {wanted}", operand.is_some())),
        }
    }
    Ok(())
}
