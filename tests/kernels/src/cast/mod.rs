//! Casts of every dtype, format, scale mode and orientation, from every layout, shape and content.

mod cases;
mod encode;
mod given;
mod scale;

use cubecl::prelude::*;
use float8_kernels::{
    Cast, Format, Granularity, MatrixView, Orientation, quantize, quantize_with_amax, reference, row_words,
};

pub use self::encode::encoder_inputs;
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
        all.add(case.name("quantize"), |client| {
            let (view, x) = case.input.upload(client, 21);
            check(client, &view, &x, case.cast, case.orientation, None)
        });
    }
    scale::add(all);
    given::add(all);
    encode::add(all);
}

/// An amax that the cast does not compute itself.
#[derive(Clone, Copy)]
struct Given {
    amax: f32,
    /// Its place in a history of six.
    place: usize,
    /// Whether the cast also observes the amax of x.
    observe: bool,
}

/// Casts `view` and compares copies, scales and maxima with the reference. `x` holds the values of
/// `view`, row-major.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    view: &MatrixView,
    x: &[f32],
    cast: Cast,
    orientation: Orientation,
    given: Option<Given>,
) -> Result<f64, Failure> {
    let shape @ [rows, cols] = view.shape;
    let flipped = if orientation.cols() { transpose(x, shape) } else { vec![] };
    let sides = [(orientation.rows(), x, shape), (orientation.cols(), &flipped, [cols, rows])];
    let mut bytes = vec![4; 6];
    for (_, _, [rows, k]) in sides.into_iter().filter(|(is_wanted, ..)| *is_wanted) {
        let scales = cast.granularity.scale_words(rows, k) * 4;
        bytes.extend([rows * row_words(k) * 4, scales, scales]);
    }
    poison(client, &bytes)?;
    let done = match given {
        None => quantize(client, view, cast, orientation)?,
        Some(Given { amax, place, observe }) => {
            let mut history = [f32::NAN; 6];
            history[place] = amax;
            let handle = upload_f32(client, &history).offset_start(place as u64 * 4);
            quantize_with_amax(client, view, &handle, observe, cast, orientation)?
        }
    };
    let copies = [("by rows", &done.rows), ("by columns", &done.cols)];
    for ((what, copy), (is_wanted, x, shape)) in copies.into_iter().zip(sides) {
        if copy.is_some() != is_wanted {
            return Err(wrong!("a copy {what}: {}, asked for: {is_wanted}", copy.is_some()));
        }
        if let Some(copy) = copy {
            let want = match given {
                None => HostMatrix::cast(x, shape, cast),
                Some(Given { amax, .. }) => HostMatrix::cast_by(amax, x, shape, cast),
            };
            HostMatrix::read(client, copy)?.must_be(&want).map_err(|failure| wrong!("{what}: {failure}"))?;
        }
    }
    let amax = read_f32(client, done.amax)?;
    if let Some(Given { amax: given, observe, .. }) = given {
        must_be(&amax[..1], &[if observe { reference::amax(x) } else { given }], 1)?;
        return Ok(0.0);
    }
    let len = cast.granularity.amax_len(rows, cols, orientation);
    if amax.len() != len {
        return Err(wrong!("{} maxima, not {len}", amax.len()));
    }
    must_be(&[reference::amax(&amax)], &[reference::amax(x)], 1)?;
    if cast.granularity == Granularity::Row {
        let (x, k) = if orientation.rows() { (x, cols) } else { (&flipped[..], rows) };
        must_be(&amax, &x.chunks(k).map(reference::amax).collect::<Vec<_>>(), 1)?;
    }
    Ok(0.0)
}
