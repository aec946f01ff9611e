//! Scales of every kind of amax, from each kernel that computes scales.
//!
//! The codes of a group are compared too; some are products of subnormals.

use cubecl::prelude::*;
use float8_kernels::{Cast, Granularity, Orientation, ScaleMode, quantize, reference};
use test_data::{amaxes, binade_edges};

use super::{casts, check, describe};
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::F32;
use crate::device::{Layout, must_be, poison, read_f32, sync, upload};

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for cast in casts() {
        if cast.granularity == Granularity::Tensor {
            all.add(format!("scale {}", describe(cast)), |client| check_tensors(client, cast));
            continue;
        }
        // If columns are cast too, another kernel computes the scales of rows.
        let beside = (cast.granularity == Granularity::Row).then_some(Orientation::Both);
        for orientation in [Orientation::Rows].into_iter().chain(beside) {
            let name = format!("scale {} {orientation:?}", describe(cast));
            all.add(name, |client| check_groups(client, cast, orientation));
        }
    }
}

/// One group for each amax: the amax, then its half, its quarter and so on.
fn check_groups<R: Runtime>(client: &ComputeClient<R>, cast: Cast, orientation: Orientation) -> Result<f64, Failure> {
    let amaxes = [amaxes(300, 7), binade_edges(2000, 90)].concat();
    // Rows and columns of a group. Squares have only one column here.
    let [height, width] = match (cast.granularity, cast.scale_mode) {
        (Granularity::Block128x128, _) => [128, 1],
        (Granularity::Block1x128, _) => [1, 128],
        (_, ScaleMode::E8m0Square(_)) => [32, 1],
        _ => [1, 32],
    };
    let halved = |amax: f32| (0..height * width).map(move |i| -amax * 0.5f32.powi(i as i32));
    let x: Vec<f32> = amaxes.iter().flat_map(|&amax| halved(amax)).collect();
    let shape = [amaxes.len() * height, width];
    let (view, x) = upload(client, &x, shape, Layout::RowMajor, F32);
    check(client, &view, &x, cast, orientation, None)
}

/// Casts each amax as a matrix of one element.
fn check_tensors<R: Runtime>(client: &ComputeClient<R>, cast: Cast) -> Result<f64, Failure> {
    let amaxes = amaxes(300, 7);
    poison(client, &[16; 6])?;
    let mut done = vec![];
    for amax in &amaxes {
        let (view, _) = upload(client, &[-amax], [1, 1], Layout::RowMajor, F32);
        let one = quantize(client, &view, cast, Orientation::Rows)?;
        let Some(rows) = one.rows else { return Err(wrong!("no copy by rows")) };
        done.push([one.amax, rows.inv_scale]);
    }
    sync(client)?;
    for (&amax, [got, inverse]) in amaxes.iter().zip(done) {
        let got = [read_f32(client, got)?[0], read_f32(client, inverse)?[0]];
        let want = reference::amax_to_scale(amax, cast.format, cast.scale_mode).inverse();
        must_be(&got, &[amax, want.get()], 1).map_err(|failure| wrong!("amax and inverse of {amax:e}: {failure}"))?;
    }
    Ok(0.0)
}
