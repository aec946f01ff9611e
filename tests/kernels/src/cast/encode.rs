//! The encoder: every 16-bit float, and f32 at and between all values of a format, for scales of
//! every size.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use float8_kernels::{Cast, Format, Granularity, Orientation, ScaleMode, reference};
use test_data::encoder_edges;

use super::Given;
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{DTYPES, F32, Random, from_dtype};
use crate::device::{Layout, upload};

/// Number of random values of each kind.
const RANDOM: usize = 1 << 18;

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| Format::ALL.map(|format| (dtype, format))) {
        all.add(format!("encode {dtype} {format}"), |client| check(client, dtype, format));
    }
}

/// Every 16-bit float of the dtype. For f32, the edges of the format, `random` bit patterns, and
/// `random` values within and just around its range.
pub fn encoder_inputs(dtype: StorageType, format: Format, random: usize) -> Vec<f32> {
    if dtype != F32 {
        return from_dtype(&(0..=u16::MAX).flat_map(u16::to_le_bytes).collect::<Vec<_>>(), dtype);
    }
    let codes = (0..=format.max_code()).map(|code| f64::from(reference::decode(code, format)));
    let stream = &mut Random::new(3);
    let mut x = encoder_edges(&codes.collect::<Vec<_>>());
    x.extend((0..random).map(|_| f32::from_bits(stream.bits())));
    let (low, high) = match format {
        Format::E4m3 => (-13.0, 10.0),
        Format::E5m2 => (-20.0, 17.0),
    };
    let magnitude = |unit: f32| (low + (high - low) * (unit + 1.0) / 2.0).exp2();
    x.extend((0..random).map(|_| magnitude(stream.unit()).copysign(stream.unit())));
    x
}

fn check<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, format: Format) -> Result<f64, Failure> {
    let x = encoder_inputs(dtype, format, RANDOM);
    let (view, x) = upload(client, &x, [1, x.len()], Layout::RowMajor, dtype);
    let cast = Cast { format, granularity: Granularity::Tensor, scale_mode: ScaleMode::F32 };
    // In order: scales of 1, 0.7371, 3e7, the largest, the smallest, and NaN.
    for amax in [format.max(), format.max() / 0.7371, format.max() / 3.0e7, 0.0, f32::INFINITY, f32::NAN] {
        let given = Given { amax, place: 0, observe: false };
        super::check(client, &view, &x, cast, Orientation::Rows, Some(given))
            .map_err(|failure| wrong!("amax {amax:e}: {failure}"))?;
    }
    Ok(0.0)
}
