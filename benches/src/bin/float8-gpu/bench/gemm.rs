//! TFLOP/s of the scaled GEMM, and on the same shapes of Burn's matmul and of the kernel for 16-bit
//! matrices.
//!
//! ```text
//! TFLOP/s = 2 · M · N · K / time
//! ```

use std::cell::LazyCell;

use burn::tensor::{Distribution, Tensor};
use float8_kernels::{Format, GemmConfig, Granularity, HalfGemm, gemm_path, has_half_gemm, scaled_gemm};
use kernel_tests::Failure;
use serde_json::json;

use super::data::{Scales, Values, sets};
use super::timing::Clock;
use super::{Bench, Size};
use crate::target::Target;

/// K and N of the linears of Llama 3 8B and 70B: q and o, k and v, gate and up, down.
const LLAMA: [[usize; 2]; 8] = [
    [4096, 4096],
    [4096, 1024],
    [4096, 14_336],
    [14_336, 4096],
    [8192, 8192],
    [8192, 1024],
    [8192, 28_672],
    [28_672, 8192],
];

/// Tokens.
const TOKENS: [usize; 3] = [2048, 8192, 16_384];

/// Shapes that are also measured with scales of rows, blocks and MX.
const SCALED: [[usize; 3]; 3] = [[4096, 4096, 4096], [8192, 4096, 4096], [8192, 14_336, 4096]];

/// Shapes, starting with the cubes of the performance targets: 4096, 8192 and 2048.
pub fn shapes(size: Size) -> Vec<[usize; 3]> {
    let cubes = [4096, 8192, 2048, 1024, 16_384].map(|n| [n; 3]);
    let linears = TOKENS.into_iter().flat_map(|m| LLAMA.map(|[k, n]| [m, n, k]));
    let all: Vec<_> = cubes.into_iter().chain(linears).collect();
    size.of(&[[64, 64, 64], [128, 192, 256]], 3, &all)
}

/// TFLOP/s.
pub fn rate([m, n, k]: [usize; 3], seconds: f64) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64 / seconds * 1e-12
}

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    let tensorwise = [Granularity::Tensor; 2].map(Scales::from);
    measure::<T>(bench, shapes(bench.size).into_iter().map(|shape| (shape, tensorwise)), bench.with_burn);
}

pub fn scaled<T: Target>(bench: &mut Bench<'_>) {
    let blocks = [Granularity::Block1x128, Granularity::Block128x128];
    let scaled = [
        [Granularity::Row; 2].map(Scales::from),
        blocks.map(Scales::from),
        // Scales that Blackwell's tensor cores apply.
        blocks.map(|granularity| Scales { granularity, power_of_two: true }),
        [Granularity::Block1x32; 2].map(Scales::from),
    ];
    let shapes = bench.size.of(&[[64, 64, 64]], 1, &SCALED);
    let cases = shapes.into_iter().flat_map(|shape| scaled.map(|scales| (shape, scales)));
    measure::<T>(bench, cases, false);
}

/// Measures each shape with its scales, and Burn's matmul on it.
fn measure<T: Target>(bench: &mut Bench<'_>, cases: impl Iterator<Item = ([usize; 3], [Scales; 2])>, with_burn: bool) {
    let table = LazyCell::new(|| Values::new(Format::E4m3));
    for (shape @ [m, n, k], of) in cases {
        let granularities @ [left, right] = of.map(|scales| scales.granularity);
        let mut scales = if left == right { left.to_string() } else { format!("{left},{right}") };
        if of[0].power_of_two && left != Granularity::Block1x32 {
            scales += ", powers of two";
        }
        bench.case(&format!("gemm {m}x{n}x{k} {scales}"), |clock| {
            let client = T::client();
            let [precise, fast] = fp8::<T>(clock, &table, shape, of)?;
            let high = with_burn.then(|| high::<T>(clock, shape));
            let halves = halves::<T>(clock, &table, shape);
            // Frees the memory for the next shape.
            client.memory_cleanup();
            let path = gemm_path(&client, granularities, GemmConfig::default()).to_string();
            Ok(json!({
                "shape": shape, "scales": scales, "path": path, "precise": precise, "fast": fast, "burn": high,
                "to_burn": high.map(|high| precise / high), "halves": halves, "torch": null, "torch_bf16": null,
            }))
        });
    }
}

/// TFLOP/s, precise and fast.
pub fn fp8<T: Target>(
    clock: Clock,
    table: &Values,
    shape @ [m, n, k]: [usize; 3],
    [left, right]: [Scales; 2],
) -> Result<[f64; 2], Failure> {
    let client = T::client();
    let out = T::compute_dtype().into();
    let sets: Vec<_> = (0..sets((m + n) * k))
        .map(|i| [table.operand(&client, [m, k], left, 2 * i), table.operand(&client, [n, k], right, 2 * i + 1)])
        .collect();
    let [a, b] = &sets[0];
    scaled_gemm(&client, a, b, None, out, GemmConfig::default())?;
    Ok([false, true].map(|use_fast_accum| {
        let config = GemmConfig { use_fast_accum, emulate: false };
        let seconds = clock.rotate::<T, _>(&sets, |[a, b]| {
            scaled_gemm(&client, a, b, None, out, config).expect("it took such operands before");
        });
        rate(shape, seconds)
    }))
}

/// TFLOP/s of the product in the compute dtype by the kernel for 16-bit matrices, if there is one.
fn halves<T: Target>(clock: Clock, table: &Values, shape @ [m, n, k]: [usize; 3]) -> Option<f64> {
    let (client, out) = (T::client(), T::compute_dtype().into());
    let matrix = |shape, seed| table.matrix(&client, shape, out, seed);
    let sets: Vec<_> = if has_half_gemm(&client) {
        (0..sets((m + n) * k * 2)).map(|i| [matrix([m, k], 2 * i), matrix([k, n], 2 * i + 1)]).collect()
    } else {
        vec![]
    };
    let [a, b] = sets.first()?;
    let variant = HalfGemm { a, b, bias: None, out }.variant(&client).ok()?;
    let seconds = clock.rotate::<T, _>(&sets, |[a, b]| {
        HalfGemm { a, b, bias: None, out }.run(&client, &variant).expect("the variant's matrices");
    });
    Some(rate(shape, seconds))
}

fn high<T: Target>(clock: Clock, shape @ [m, n, k]: [usize; 3]) -> f64 {
    let (device, dtype) = (Default::default(), T::compute_dtype());
    let matrix =
        |shape: [usize; 2]| Tensor::<T::Backend, 2>::random(shape, Distribution::Normal(0.0, 1.0), &device).cast(dtype);
    let sets: Vec<_> = (0..sets((m + n) * k * 2)).map(|_| [matrix([m, k]), matrix([k, n])]).collect();
    rate(shape, clock.rotate::<T, _>(&sets, |[a, b]| drop(a.clone().matmul(b.clone()))))
}
