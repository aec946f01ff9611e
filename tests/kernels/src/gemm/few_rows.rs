//! GEMMs of few enough rows for a GEMV: all pairs of granularities, and rows that do not affect
//! each other.

use cubecl::prelude::*;
use float8_kernels::{Format, GEMV_ROWS, Granularity};

use super::{Gemm, Memory};
use crate::Failure;
use crate::case::{Cases, pairs, wrong};
use crate::data::DTYPES;
use crate::device::must_be;
use crate::matrix::{Codes, HostMatrix};

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for granularity in Granularity::ALL {
        all.add(format!("scaled_gemm rows alone {granularity}"), |client| check_alone(client, granularity));
    }
}

/// Cases of few rows: all pairs of granularities, with varying bias, output memory and dtype.
pub(super) fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Gemm> {
    const CODES: [Codes; 5] = [Codes::Exact, Codes::NanCode, Codes::InfCode, Codes::NanScale, Codes::Zeros];
    let outs = all.dtypes();
    let shapes =
        all.sizes(&[[1, 131, 300], [2, 70, 33], [3, 6, 2100], [4, 9, 513]], &[[1, 14_336, 4096], [4, 4100, 14_340]]);
    let mut cases = vec![];
    for (s, shape) in shapes.into_iter().enumerate() {
        for [i, j] in pairs([0, 1, 2, 3, 4]) {
            let case = Gemm {
                formats: [Format::ALL[(i + s) % 2], Format::ALL[(j + s / 2) % 2]],
                granularities: [Granularity::ALL[i], Granularity::ALL[j]],
                bias: ((i + j + s) % 2 == 1).then_some((DTYPES[(i + j) % 3], 1 + i % 2)),
                memory: [Memory::Fresh, Memory::Given][(i + 2 * j + s) % 2],
                out: outs[(i + j + s) % outs.len()],
                ..Gemm::new(shape)
            };
            cases.extend([case, Gemm { codes: CODES[(i + j + s) % 5], ..case }]);
        }
    }
    cases
}

/// Within a path, the result of a row depends neither on the other rows nor on their number.
fn check_alone<R: Runtime>(client: &ComputeClient<R>, granularity: Granularity) -> Result<f64, Failure> {
    for (format, shape @ [n, k]) in [(Format::E4m3, [37, 2310]), (Format::E5m2, [6, 515])] {
        let b = HostMatrix::new(Codes::Random, shape, format, granularity, 34);
        let all = HostMatrix::new(Codes::Random, [GEMV_ROWS, k], format, granularity, 33);
        let [scales, width] = granularity.scale_dims(GEMV_ROWS, k);
        let rows = |from: usize, to: usize| {
            let codes = all.codes[from * k..to * k].to_vec();
            // With one scale, and with squares of 128, all rows share the first scales.
            let own = if scales == 1 { 0..width } else { from * width..to * width };
            let a =
                HostMatrix { codes, inv_scales: all.inv_scales[own].to_vec(), shape: [to - from, k], ..all.clone() };
            let gemm = Gemm { granularities: [granularity; 2], ..Gemm::new([to - from, n, k]) };
            gemm.multiply(client, [&a, &b], &[])
        };
        let together = rows(0, GEMV_ROWS)?;
        for (from, to) in (0..GEMV_ROWS).flat_map(|from| (from + 1..=GEMV_ROWS).map(move |to| (from, to))) {
            let same = must_be(&rows(from, to)?, &together[from * n..to * n], n);
            same.map_err(|failure| wrong!("rows {from}..{to}: {failure}"))?;
        }
    }
    Ok(0.0)
}
