//! Casts with a given amax.
//!
//! The scale comes from the given amax, larger elements saturate, and x's own amax is observed on
//! request.

use cubecl::prelude::*;
use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleMode, reference};

use super::{Case, Given, ORIENTATIONS, casts, check};
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{DTYPES, F32};
use crate::device::{Layout, upload};
use crate::input::{Input, far_places};

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for (case, place) in cases() {
        for observe in [false, true] {
            let name = format!("{} {}", case.name("quantize_with_amax"), if observe { "observed" } else { "given" });
            // Below, at and above the amax of x; then 0, infinity and NaN.
            let amaxes = |own| [0.1, own, 1e4, 0.0, f32::INFINITY, f32::NAN];
            all.add(name, |client| {
                let (view, x) = case.input.upload(client, 21);
                let given = Given { amax: amaxes(reference::amax(&x))[place], place, observe };
                check(client, &view, &x, case.cast, case.orientation, Some(given))
            });
        }
    }
    for orientation in ORIENTATIONS {
        let name = format!("quantize_with_amax 300x500 f32 pitched peak {orientation:?} observed");
        all.add(name, |client| check_peak(client, orientation));
    }
}

/// Tensorwise casts. Each layout has another given amax, at its own position in a history of six.
fn cases() -> Vec<(Case, usize)> {
    let mut cases = vec![];
    for dtype in DTYPES {
        for cast in casts().filter(|cast| cast.granularity == Granularity::Tensor) {
            for orientation in ORIENTATIONS {
                let case = Case { input: Input::new([70, 133], dtype), cast, orientation };
                let with = |layout| Case { input: Input { layout, ..case.input }, ..case };
                cases.extend(Layout::ALL.into_iter().enumerate().map(|(place, layout)| (with(layout), place)));
                // Rows of whole vectors.
                cases.push((Case { input: Input::new([70, 128], dtype), ..case }, 1));
            }
        }
    }
    cases
}

/// Places of the peak among many tiles; NaN wins. The code of a NaN is NaN, although the given amax
/// is finite.
fn check_peak<R: Runtime>(client: &ComputeClient<R>, orientation: Orientation) -> Result<f64, Failure> {
    let shape = [300, 500];
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let given = Some(Given { amax: 1.0, place: 0, observe: true });
    let mut x = vec![0.25; shape[0] * shape[1]];
    for place in far_places(shape) {
        for value in [-2.5, f32::INFINITY, f32::NAN] {
            x[place] = value;
            let (view, _) = upload(client, &x, shape, Layout::Pitched, F32);
            check(client, &view, &x, cast, orientation, given)
                .map_err(|failure| wrong!("{value} at {place}: {failure}"))?;
        }
        x[place] = 0.25;
    }
    Ok(0.0)
}
