//! Groups to check: sizes, scales, formats, contents and outputs.

use cubecl::prelude::*;
use float8_kernels::{Format, GemmPath, Granularity, Grouping, supports};

use super::{GROUPINGS, GroupSizes, GroupedGemm};
use crate::case::Cases;
use crate::compare::{EMULATE, FAST, PRECISE};
use crate::data::{BF16, DTYPES, F32};
use crate::matrix::{Codes, MX};

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

pub(super) fn all<R: Runtime>(all: &Cases<'_, R>) -> Vec<GroupedGemm> {
    let client = all.client;
    let outs = DTYPES.into_iter().filter(|dtype| supports(client, *dtype)).collect::<Vec<_>>();
    let half = if outs.contains(&BF16) { BF16 } else { *outs.last().unwrap_or(&F32) };
    let mut cases = vec![];
    for grouping in GROUPINGS {
        let new = |sizes, rest, granularities| GroupedGemm { granularities, ..GroupedGemm::new(grouping, sizes, rest) };
        for (sizes, rest) in SIZES.into_iter().flat_map(|sizes| RESTS.map(|rest| (sizes, rest))) {
            for granularity in THOROUGH {
                cases.push(new(sizes, rest, [granularity; 2]));
            }
            cases.push(GroupedGemm { codes: Codes::Exact, out: half, ..GroupedGemm::new(grouping, sizes, rest) });
        }
        for (sizes, rest) in all.sizes(&[], &LARGE) {
            let case = GroupedGemm::new(grouping, sizes, rest);
            cases.extend([case, GroupedGemm { codes: Codes::Exact, out: half, ..case }]);
            cases.push(new(sizes, rest, [Granularity::Row; 2]));
            cases.push(GroupedGemm { out: half, ..new(sizes, rest, [MX; 2]) });
            cases.push(GroupedGemm {
                out: half,
                ..new(sizes, rest, [Granularity::Block1x128, Granularity::Block128x128])
            });
            cases.push(new(sizes, rest, [Granularity::Block1x128; 2]));
        }
        for granularities in Granularity::ALL.into_iter().flat_map(|a| Granularity::ALL.map(|b| [a, b])) {
            // Matrices of B that begin inside a tile of scales.
            for rest in [[70, 200], [200, 384]] {
                for codes in [Codes::Random, Codes::Exact] {
                    cases.push(GroupedGemm { codes, ..new(MIXED, [rest[0], rest[1]], granularities) });
                }
            }
            cases.push(GroupedGemm { wild: true, ..new((MIXED.0, 0), [40, 96], granularities) });
        }
        for granularity in THOROUGH {
            for formats in Format::ALL.into_iter().flat_map(|a| Format::ALL.map(|b| [a, b])) {
                for codes in [Codes::Random, Codes::NanCode, Codes::InfCode] {
                    cases.push(GroupedGemm { formats, codes, ..new(MIXED, [131, 133], [granularity; 2]) });
                }
            }
            for &out in &outs {
                for codes in [Codes::Random, Codes::Exact, Codes::NanCode] {
                    // Output rows of a multiple of 16 bytes, and of other lengths.
                    for rest in [[129, 99], [128, 160]] {
                        cases.push(GroupedGemm { out, codes, ..new((&[100, 0, 77], 150), rest, [granularity; 2]) });
                    }
                }
            }
            // The last scale belongs to the last group, or to no group.
            for after in [0, 300] {
                for codes in [Codes::NanScale, Codes::NanCode, Codes::Zeros] {
                    cases.push(GroupedGemm { codes, ..new((&[0, 64, 90], after), [64, 140], [granularity; 2]) });
                }
            }
        }
    }
    let configs = |case: GroupedGemm| [PRECISE, FAST, EMULATE].map(|config| GroupedGemm { config, ..case });
    // If all configs select the same kernel, one of them is enough.
    let differs = |case: &GroupedGemm| {
        case.config == PRECISE || GroupedGemm { config: PRECISE, ..*case }.path(client) != GemmPath::Emulated
    };
    cases.into_iter().flat_map(configs).filter(differs).chain(emulated()).collect()
}

/// Cases for the emulated kernel only, since tensor-core kernels take long to compile.
///
/// Groups with more rows of tiles than the kernel traverses together, and groups of random sizes.
fn emulated() -> impl Iterator<Item = GroupedGemm> {
    let bands = [(Grouping::Rows, [130, 40]), (Grouping::Contraction, [1100, 130])];
    let bands = bands.map(|(grouping, rest)| GroupedGemm::new(grouping, BANDS, rest));
    let any =
        GROUPINGS.into_iter().flat_map(|grouping| ANY.map(|(sizes, rest)| GroupedGemm::new(grouping, sizes, rest)));
    let cases = bands.into_iter().chain(any).flat_map(|case| {
        [Granularity::Row, MX].map(|granularity| GroupedGemm {
            granularities: [granularity; 2],
            config: EMULATE,
            ..case
        })
    });
    cases.map(|case| GroupedGemm { formats: [Format::E4m3, Format::E5m2], ..case })
}
