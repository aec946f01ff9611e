//! GEMMs to check: every pair of formats and granularities, every bias and output, and ragged, tiny
//! and large shapes.

use cubecl::prelude::*;
use float8_kernels::{Format, Granularity};

use super::{Gemm, Memory};
use crate::case::{Cases, pairs};
use crate::compare::EMULATE;
use crate::data::{BF16, F16, F32, Random};
use crate::matrix::Codes;

/// Sizes around tiles of 64, 128, 192 and 256, blocks of 128 and padding to 16.
const SHAPES: [[usize; 3]; 16] = [
    [1, 1, 1],
    [1, 1, 1000],
    [5, 1, 1000],
    [3, 5, 17],
    [17, 33, 16],
    [64, 64, 64],
    [1, 200, 100],
    [130, 1, 48],
    [65, 129, 15],
    [128, 128, 128],
    [129, 193, 144],
    [193, 65, 257],
    [130, 257, 300],
    [257, 130, 32],
    [192, 256, 384],
    [64, 384, 640],
];

/// Many tiles, long contractions, small M, and sizes of Llama.
const LARGE: [[usize; 3]; 18] = [
    [1, 4096, 4096],
    [16, 14_336, 4096],
    [33, 2050, 8200],
    [4096, 1, 1024],
    [192, 384, 8192],
    [193, 385, 4112],
    [255, 257, 2047],
    [513, 769, 1025],
    [300, 300, 16_384],
    [1024, 1024, 1024],
    [1536, 1664, 1920],
    [2048, 2048, 2048],
    [4097, 4095, 100],
    [4096, 4096, 4096],
    [4224, 4352, 4000],
    [2000, 6144, 4096],
    [2048, 4096, 14_336],
    [8192, 4112, 1040],
];

/// M, N and K on both sides of the edges of blocks.
const BLOCKS: [[usize; 3]; 5] = [[2, 1, 1], [5, 3, 128], [70, 130, 129], [129, 257, 300], [2, 3, 513]];

/// Number of random shapes.
const ANY: u64 = 48;

/// More than eight rows of tiles.
const BANDS: [usize; 3] = [1100, 130, 40];

pub(super) fn all<R: Runtime>(all: &Cases<'_, R>) -> Vec<Gemm> {
    let mut cases = vec![];
    for shape in all.sizes(&SHAPES, &LARGE) {
        let exact = Gemm { codes: Codes::Exact, out: all.half(), bias: Some((F32, 1)), ..Gemm::new(shape) };
        cases.extend([Gemm::new(shape), exact]);
    }
    for formats in pairs(Format::ALL) {
        let codes = [Codes::Random, Codes::Exact, Codes::Zeros, Codes::NanCode, Codes::InfCode];
        for codes in codes.into_iter().chain([Codes::EachLeft, Codes::EachRight]) {
            cases.push(Gemm { formats, codes, ..Gemm::new([70, 133, 200]) });
        }
    }
    for granularities in pairs(Granularity::ALL) {
        for shape in all.sizes(&[[130, 137, 300]], &[[1025, 1100, 2060], [300, 260, 128], [2048, 2304, 2560]]) {
            cases.extend([Codes::Random, Codes::Exact].map(|codes| Gemm { granularities, codes, ..Gemm::new(shape) }));
        }
    }
    for granularity in Granularity::ALL {
        for codes in [Codes::NanCode, Codes::NanScale, Codes::Zeros] {
            for (granularities, shape) in
                [([granularity, Granularity::Row], [140, 6, 300]), ([Granularity::Row, granularity], [6, 140, 300])]
            {
                cases.push(Gemm { granularities, codes, ..Gemm::new(shape) });
            }
        }
    }
    for out in all.dtypes() {
        for (i, bias) in [None, Some(F32), Some(F16), Some(BF16)].into_iter().enumerate() {
            for shape in [[66, 70, 48], [129, 133, 272]] {
                let case = Gemm { out, bias: bias.map(|dtype| (dtype, i)), ..Gemm::new(shape) };
                let given = Gemm { memory: Memory::Given, ..case };
                cases.extend([case, Gemm { codes: Codes::Exact, ..case }, given]);
            }
        }
    }
    cases
}

/// Cases for the emulated kernel only, since tensor-core kernels take long to compile.
///
/// All pairs of granularities with mixed formats, with and without bias, for shapes around blocks
/// and random shapes. One shape has more rows of tiles than the kernel traverses together.
pub(super) fn emulated() -> Vec<Gemm> {
    let pair = |shape, [i, j]: [usize; 2]| Gemm {
        formats: [Format::ALL[i % 2], Format::ALL[j % 2]],
        granularities: [Granularity::ALL[i], Granularity::ALL[j]],
        bias: ((i + j) % 2 == 1).then_some((F32, 1)),
        config: EMULATE,
        ..Gemm::new(shape)
    };
    let of_pairs = |shape| pairs([0, 1, 2, 3, 4]).map(move |ij| pair(shape, ij));
    let mut cases: Vec<_> = BLOCKS.into_iter().flat_map(of_pairs).collect();
    cases.extend((0..ANY).map(|seed| {
        let random = &mut Random::new(3000 + seed);
        let shape = [150, 150, 420].map(|most| 1 + random.below(most));
        pair(shape, [random.below(5), random.below(5)])
    }));
    cases.push(Gemm { config: EMULATE, ..Gemm::new(BANDS) });
    cases
}
