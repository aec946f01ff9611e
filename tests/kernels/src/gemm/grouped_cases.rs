//! Groups to check: sizes, scales, formats, contents and outputs.

use cubecl::prelude::*;
use float8_kernels::{Format, Granularity, Grouping};

use super::{Gemm, GroupSizes, GroupsCase};
use crate::case::{Cases, pairs};
use crate::compare::EMULATE;
use crate::matrix::{Codes, MX};

pub(super) const GROUPINGS: [Grouping; 2] = [Grouping::Rows, Grouping::Contraction];

/// Granularities for which every size and format is checked.
const THOROUGH: [Granularity; 3] = [Granularity::Tensor, Granularity::Row, MX];

/// Empty groups at both ends and between, a single row, and tiles shared by two or three groups.
pub(super) const MIXED: GroupSizes = (&[0, 70, 1, 0, 133, 0], 10);

/// One group; ends at tile edges with more than one tile after them; many groups in a tile; only
/// empty groups.
pub(super) const SIZES: [GroupSizes; 6] =
    [(&[130], 0), MIXED, (&[64, 128, 64], 200), (&[3; 24], 1), (&[0, 0], 33), (&[300, 5, 260], 0)];

/// The two dimensions that the groups do not divide.
const RESTS: [[usize; 2]; 3] = [[1, 17], [200, 160], [128, 256]];

/// Balanced and skewed experts, many experts with few rows, and few experts with many.
const LARGE: [(GroupSizes, [usize; 2]); 6] = [
    ((&[512; 8], 0), [1024, 1024]),
    ((&[3001, 499, 0, 17, 300, 129, 100, 50], 137), [1032, 1040]),
    ((&[9; 128], 5), [256, 512]),
    ((&[5000, 3192], 0), [200, 160]),
    ((&[0, 2000, 1, 1000, 1095], 0), [2048, 2304]),
    ((&[4096, 0, 0, 0], 4096), [768, 2048]),
];

/// More than eight rows of tiles in a group.
const BANDS: GroupSizes = (&[70, 0, 1072, 20], 100);

/// Random sizes, drawn once: up to six groups of up to 150.
const ANY: [(GroupSizes, [usize; 2]); 8] = [
    ((&[17, 149, 0, 3, 96, 33], 7), [61, 96]),
    ((&[148], 19), [5, 33]),
    ((&[1, 2, 4, 8, 16, 32], 0), [88, 17]),
    ((&[65, 0, 0, 127, 129], 1), [70, 65]),
    ((&[0, 144, 63, 0], 12), [1, 1]),
    ((&[111, 17, 128], 0), [34, 130]),
    ((&[31, 32, 33, 95, 97], 3), [12, 7]),
    ((&[0, 0, 0, 1], 0), [89, 50]),
];

pub(super) fn all<R: Runtime>(all: &Cases<'_, R>) -> Vec<Gemm> {
    let (outs, half, mut cases) = (all.dtypes(), all.half(), vec![]);
    for grouping in GROUPINGS {
        let new = |sizes, rest, granularities| Gemm { granularities, ..Gemm::grouped(grouping, sizes, rest) };
        for (sizes, rest) in SIZES.into_iter().flat_map(|sizes| RESTS.map(|rest| (sizes, rest))) {
            cases.extend(THOROUGH.map(|granularity| new(sizes, rest, [granularity; 2])));
            cases.push(Gemm { codes: Codes::Exact, out: half, ..Gemm::grouped(grouping, sizes, rest) });
        }
        for (sizes, rest) in all.sizes(&[], &LARGE) {
            let case = Gemm::grouped(grouping, sizes, rest);
            let blocks = [Granularity::Block1x128, Granularity::Block128x128];
            cases.extend([case, Gemm { codes: Codes::Exact, out: half, ..case }]);
            cases.extend([Granularity::Row, Granularity::Block1x128].map(|one| new(sizes, rest, [one; 2])));
            cases.extend([[MX; 2], blocks].map(|pair| Gemm { out: half, ..new(sizes, rest, pair) }));
        }
        for granularities in pairs(Granularity::ALL) {
            // Matrices of B that begin inside a tile of scales.
            for rest in [[70, 200], [200, 384]] {
                let new = new(MIXED, rest, granularities);
                cases.extend([Codes::Random, Codes::Exact].map(|codes| Gemm { codes, ..new }));
            }
            let new = new((MIXED.0, 0), [40, 96], granularities);
            cases.push(Gemm { groups: new.groups.map(|groups| GroupsCase { wild: true, ..groups }), ..new });
        }
        for granularity in THOROUGH {
            let new = |sizes, rest| new(sizes, rest, [granularity; 2]);
            for formats in pairs(Format::ALL) {
                let codes = [Codes::Random, Codes::NanCode, Codes::InfCode];
                cases.extend(codes.map(|codes| Gemm { formats, codes, ..new(MIXED, [131, 133]) }));
            }
            // Output rows of a multiple of 16 bytes, and of other lengths.
            for (&out, rest) in outs.iter().flat_map(|out| [[129, 99], [128, 160]].map(|rest| (out, rest))) {
                let codes = [Codes::Random, Codes::Exact, Codes::NanCode];
                cases.extend(codes.map(|codes| Gemm { out, codes, ..new((&[100, 0, 77], 150), rest) }));
            }
            // The last scale belongs to the last group, or to no group.
            for after in [0, 300] {
                let codes = [Codes::NanScale, Codes::NanCode, Codes::Zeros];
                cases.extend(codes.map(|codes| Gemm { codes, ..new((&[0, 64, 90], after), [64, 140]) }));
            }
        }
    }
    cases
}

/// Cases for the emulated kernel only, since tensor-core kernels take long to compile.
///
/// Groups with more rows of tiles than the kernel traverses together, and groups of random sizes.
pub(super) fn emulated() -> Vec<Gemm> {
    let mut cases = vec![];
    for (grouping, bands) in GROUPINGS.into_iter().zip([[130, 40], [1100, 130]]) {
        for (sizes, rest) in ANY.into_iter().chain([(BANDS, bands)]) {
            cases.extend([Granularity::Row, MX].map(|granularity| Gemm {
                formats: Format::ALL,
                granularities: [granularity; 2],
                config: EMULATE,
                ..Gemm::grouped(grouping, sizes, rest)
            }));
        }
    }
    cases
}
