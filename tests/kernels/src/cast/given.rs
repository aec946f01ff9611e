//! Casts with a given amax.
//!
//! The scale comes from the given amax, larger elements saturate, and x's own amax is observed on
//! request.

use cubecl::prelude::*;
use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleMode, quantize_with_amax, reference};

use super::{Case, ORIENTATIONS, casts, check_copies, poison_copies};
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{DTYPES, F32, same};
use crate::device::{Layout, read_f32, upload, upload_f32};
use crate::input::{Input, far_places};

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for (case, place) in cases() {
        for observe in [false, true] {
            let name = format!("{} {}", case.name("quantize_with_amax"), if observe { "observed" } else { "given" });
            all.add(name, |client| check(client, &case, place, observe));
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

fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case, place: usize, observe: bool) -> Result<f64, Failure> {
    let &Case { input, cast, orientation } = case;
    let (view, x) = input.upload(client, 60);
    // Below, at and above the amax of x; then 0, infinity and NaN.
    let given = [0.1, reference::amax(&x), 1e4, 0.0, f32::INFINITY, f32::NAN][place];
    let scale = reference::amax_to_scale(given, cast.format, cast.scale_mode);
    let mut codes = vec![0; x.len()];
    reference::cast(&x, scale, cast.format, &mut codes);

    poison_copies(client, input.shape, cast, orientation)?;
    let mut history = [f32::NAN; 6];
    history[place] = given;
    let amax = upload_f32(client, &history).offset_start(place as u64 * 4);
    let done = quantize_with_amax(client, &view, &amax, observe, cast, orientation)?;
    let got = read_f32(client, done.amax.clone())?[0];
    check_copies(client, &done, input.shape, cast, orientation, |_| (codes.clone(), vec![scale]))?;
    let want = if observe { reference::amax(&x) } else { given };
    if same(got, want) { Ok(0.0) } else { Err(wrong!("amax {got:e}, not {want:e}")) }
}

/// The observed amax for a peak in any of many tiles; NaN wins. The code of a NaN is NaN, although
/// the given amax is finite.
fn check_peak<R: Runtime>(client: &ComputeClient<R>, orientation: Orientation) -> Result<f64, Failure> {
    let shape = [300, 500];
    let given = upload_f32(client, &[1.0]);
    let cast = Cast { format: Format::E4m3, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    let scale = reference::amax_to_scale(1.0, cast.format, cast.scale_mode);
    let mut x = vec![0.25; shape[0] * shape[1]];
    for place in far_places(shape) {
        for value in [-2.5, f32::INFINITY, f32::NAN] {
            x[place] = value;
            let view = upload(client, &x, shape, Layout::Pitched, F32);
            poison_copies(client, shape, cast, orientation)?;
            let done = quantize_with_amax(client, &view, &given, true, cast, orientation)?;
            let mut codes = vec![0; x.len()];
            reference::cast(&x, scale, cast.format, &mut codes);
            check_copies(client, &done, shape, cast, orientation, |_| (codes.clone(), vec![scale]))?;
            let got = read_f32(client, done.amax)?;
            if got.len() != 1 || !same(got[0], value.abs()) {
                return Err(wrong!("amax {got:?}, not {value} at {place}"));
            }
        }
        x[place] = 0.25;
    }
    Ok(0.0)
}
