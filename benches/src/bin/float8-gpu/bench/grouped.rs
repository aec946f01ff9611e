//! TFLOP/s of the grouped GEMM, and of a dense GEMM for each group.
//!
//! ```text
//! rows          M = tokens    forward             every group has [N, K]
//! contraction   K = tokens    weight gradient     every group gives [M, N]
//! TFLOP/s = 2 · M · N · K / time
//! ```

use std::cell::LazyCell;

use cubecl::prelude::CubeElement;
use float8_kernels::{
    Format, GROUP_ALIGN, GemmConfig, Granularity, Grouping, Groups, gemm_path, grouped_scaled_gemm, scaled_gemm,
};
use kernel_tests::Failure;
use serde_json::json;

use super::data::{Values, sets};
use super::gemm::rate;
use super::timing::Clock;
use super::{Bench, Size};
use crate::target::Target;

/// Tokens of each of eight experts: 8192 tokens, each routed to two of them.
const BALANCED: [usize; 8] = [2048; 8];
const SKEWED: [usize; 8] = [6001, 4099, 2503, 1597, 1031, 677, 476, 0];

/// Hidden and intermediate size of Mixtral 8x7B.
const HIDDEN: usize = 4096;
const INTERMEDIATE: usize = 14_336;

/// A grouped GEMM.
#[derive(Clone, Copy)]
pub struct Shape {
    grouping: Grouping,
    sizes: &'static [usize],
    /// N and K, or M and N along the contraction.
    rest: [usize; 2],
}

/// Shapes of forward and weight gradient, balanced and skewed.
pub fn shapes(size: Size) -> Vec<Shape> {
    let [rows, contraction] = [Grouping::Rows, Grouping::Contraction];
    let shape = |grouping, sizes, rest| Shape { grouping, sizes, rest };
    size.of(
        &[shape(rows, &[32, 32], [48, 64]), shape(contraction, &[70, 0, 33], [48, 64])],
        3,
        &[
            shape(rows, &BALANCED, [INTERMEDIATE, HIDDEN]),
            shape(rows, &SKEWED, [INTERMEDIATE, HIDDEN]),
            shape(contraction, &BALANCED, [INTERMEDIATE, HIDDEN]),
            shape(contraction, &SKEWED, [INTERMEDIATE, HIDDEN]),
            shape(rows, &BALANCED, [HIDDEN, INTERMEDIATE]),
        ],
    )
}

impl Shape {
    fn grouping(self) -> &'static str {
        match self.grouping {
            Grouping::Rows => "rows",
            Grouping::Contraction => "contraction",
        }
    }

    /// M, N and K of a group, or of all groups.
    fn product(self, tokens: usize) -> [usize; 3] {
        let [x, y] = self.rest;
        match self.grouping {
            Grouping::Rows => [tokens, x, y],
            Grouping::Contraction => [x, y, tokens],
        }
    }

    /// M, N and K, without the padding between groups.
    fn all(self) -> [usize; 3] {
        self.product(self.sizes.iter().sum())
    }

    /// Ends of the groups.
    fn ends(self) -> Vec<u32> {
        let align = match self.grouping {
            Grouping::Rows => 1,
            Grouping::Contraction => GROUP_ALIGN,
        };
        let ends = self.sizes.iter().scan(0usize, |end, size| {
            *end = end.next_multiple_of(align) + size;
            Some(*end as u32)
        });
        ends.collect()
    }

    /// The shape in the torch script's format.
    pub fn argument(self) -> String {
        let ([x, y], sizes) = (self.rest, self.sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("+"));
        format!("{}:{x}x{y}:{sizes}", self.grouping())
    }
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let table = LazyCell::new(|| Values::new(Format::E4m3));
    for shape in shapes(bench.size) {
        for granularity in [Granularity::Tensor, Granularity::Row, Granularity::Block1x32] {
            let ([m, n, k], scales) = (shape.all(), granularity.to_string());
            let grouping = shape.grouping();
            let spread = if shape.sizes.iter().all(|size| *size == shape.sizes[0]) { "balanced" } else { "skewed" };
            bench.case(&format!("grouped {grouping} {m}x{n}x{k} {spread} {scales}"), |clock| {
                let client = T::client();
                let path = gemm_path(&client, [granularity; 2], GemmConfig::default()).to_string();
                let [precise, fast] = grouped::<T>(clock, &table, shape, granularity)?;
                client.memory_cleanup();
                let dense = dense::<T>(clock, &table, shape, granularity);
                client.memory_cleanup();
                Ok(json!({
                    "grouping": grouping, "sizes": shape.sizes, "shape": [m, n, k], "scales": scales, "path": path,
                    "precise": precise, "fast": fast, "dense": dense, "to_dense": precise / dense, "torch": null,
                    "torch_bf16": null,
                }))
            });
        }
    }
}

/// One GEMM for all groups. Along the contraction the padding between groups is not zero here,
/// which does not change the time.
fn grouped<T: Target>(
    clock: Clock,
    table: &Values,
    shape: Shape,
    granularity: Granularity,
) -> Result<[f64; 2], Failure> {
    let (client, out) = (T::client(), T::compute_dtype().into());
    let (ends, count) = (shape.ends(), shape.sizes.len());
    let [m, n, k] = shape.product(ends.last().map_or(0, |&end| end as usize));
    let rows_b = if shape.grouping == Grouping::Rows { n * count } else { n };
    let groups = Groups { ends: client.create_from_slice(u32::as_bytes(&ends)), count, grouping: shape.grouping };
    let operand = |rows, seed| table.operand(&client, [rows, k], granularity, seed);
    let sets: Vec<_> = (0..sets((m + rows_b) * k)).map(|i| [operand(m, 2 * i), operand(rows_b, 2 * i + 1)]).collect();
    let [a, b] = &sets[0];
    grouped_scaled_gemm(&client, a, b, &groups, out, GemmConfig::default())?;
    Ok([false, true].map(|use_fast_accum| {
        let config = GemmConfig { use_fast_accum, emulate: false };
        let seconds = clock.rotate::<T, _>(&sets, |[a, b]| {
            grouped_scaled_gemm(&client, a, b, &groups, out, config).expect("it took such operands before");
        });
        rate(shape.all(), seconds)
    }))
}

/// A dense GEMM for each group with tokens, with separate operands and outputs.
fn dense<T: Target>(clock: Clock, table: &Values, shape: Shape, granularity: Granularity) -> f64 {
    let (client, out) = (T::client(), T::compute_dtype().into());
    let set = |i: usize| {
        let full = shape.sizes.iter().enumerate().filter(|(_, size)| **size > 0);
        let pair = |(g, size): (usize, &usize)| {
            let ([m, n, k], seed) = (shape.product(*size), 2 * (i * shape.sizes.len() + g));
            [(m, seed), (n, seed + 1)].map(|(rows, seed)| table.operand(&client, [rows, k], granularity, seed))
        };
        full.map(pair).collect::<Vec<_>>()
    };
    let sets: Vec<_> = (0..sets(bytes(shape))).map(set).collect();
    let seconds = clock.rotate::<T, _>(&sets, |set| {
        for [a, b] in set {
            scaled_gemm(&client, a, b, None, out, GemmConfig::default()).expect("operands that fit");
        }
    });
    rate(shape.all(), seconds)
}

/// Bytes of all operands' codes.
fn bytes(shape: Shape) -> usize {
    let [m, n, k] = shape.all();
    match shape.grouping {
        Grouping::Rows => (m + n * shape.sizes.len()) * k,
        Grouping::Contraction => (m + n) * k,
    }
}
