//! Casts with a given amax.
//!
//! The scale comes from the given amax, larger elements saturate, and x's own amax is observed on
//! request.

use cubecl::prelude::*;
use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleMode};

use super::{Case, Given, ORIENTATIONS, casts, check, check_view};
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
            let amax = [Some(0.1), None, Some(1e4), Some(0.0), Some(f32::INFINITY), Some(f32::NAN)][place];
            all.add(name, |client| check(client, &case, Some(Given { amax, place, observe })));
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
            for (place, layout) in Layout::ALL.into_iter().enumerate() {
                for orientation in ORIENTATIONS {
                    let input = Input { layout, ..Input::new([70, 133], dtype) };
                    cases.push((Case { input, cast, orientation }, place));
                }
            }
            // Rows of whole vectors.
            for orientation in ORIENTATIONS {
                cases.push((Case { input: Input::new([70, 128], dtype), cast, orientation }, 1));
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
    let given = Some(Given { amax: Some(1.0), place: 0, observe: true });
    let mut x = vec![0.25; shape[0] * shape[1]];
    for place in far_places(shape) {
        for value in [-2.5, f32::INFINITY, f32::NAN] {
            x[place] = value;
            let view = upload(client, &x, shape, Layout::Pitched, F32);
            check_view(client, &view, &x, cast, orientation, given)
                .map_err(|failure| wrong!("{value} at {place}: {failure}"))?;
        }
        x[place] = 0.25;
    }
    Ok(0.0)
}
