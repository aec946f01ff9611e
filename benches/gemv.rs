//! One row through an FP8 weight on the CPU, against a memory stream measured in the same rounds
//! and Burn's f32 linear.
use std::hint::black_box;
use std::time::Instant;

use burn::backend::Flex;
use burn::nn::LinearConfig;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_float8::backend::{Cast, Float8Backend, GemmConfig, GemmRequest, Orientation};
use burn_float8::config::{Format, Granularity, ScaleCalculationMode, ScaleMode};
use burn_float8::{Float8, Float8Config, Recipe, set_default_config};

use crate::median;
use crate::table::{Table, number};

/// Bytes of the stream, and least bytes of weights between two reads of one: more than caches hold.
pub const STREAM: usize = 256 << 20;

/// Memory bandwidth of all cores in GB/s: the C library compares two equal buffers.
pub fn stream([left, right]: [&[u8]; 2]) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let part = left.len().div_ceil(threads);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (left, right) in left.chunks(part).zip(right.chunks(part)) {
            scope.spawn(move || assert!(black_box(left) == black_box(right)));
        }
    });
    (left.len() + right.len()) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Casts of x and w for a recipe.
fn casts() -> [(&'static str, Recipe, Granularity, Granularity, ScaleMode); 4] {
    let e8m0 = ScaleMode::E8m0(ScaleCalculationMode::default());
    [
        ("tensor", Recipe::Tensorwise, Granularity::Tensor, Granularity::Tensor, ScaleMode::F32),
        ("row", Recipe::Rowwise, Granularity::Row, Granularity::Row, ScaleMode::PowerOfTwo),
        ("128x128", Recipe::Blockwise, Granularity::Block1x128, Granularity::Block128x128, ScaleMode::F32),
        ("1x32", Recipe::Mxfp8, Granularity::Block1x32, Granularity::Block1x32, e8m0),
    ]
}

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// Table by granularity of a weight, number of rows of x, and size. Measurements alternate, so
/// that other load on the machine slows them equally.
pub fn table(repeat: u32) -> Table {
    let device = Default::default();
    let (left, right) = (vec![1_u8; STREAM / 2], vec![1_u8; STREAM / 2]);
    let mut table = Table::new(
        "a few rows through an FP8 weight on the CPU: codes read, a stream beside them, and Burn's f32 linear to the whole linear",
        &["scales", "size", "rows", "us", "GB/s", "stream", "of stream", "speed-up"],
    );
    for (name, recipe, of_x, of_w, scale_mode) in casts() {
        set_default_config::<Float8<Flex>>(&device, Some(&Float8Config::new(recipe))).expect("needs no layer");
        for size in [2048, 4096, 8192] {
            for m in [1, 4] {
                // More weights than caches hold.
                let count = (STREAM / 4 / (size * size)).max(1);
                let cast = |granularity| Cast { format: Format::E4m3, granularity, scale_mode };
                let quantized = |rows: usize, cast, orientation| {
                    let t = Tensor::<Flex, 2>::random([rows, size], Distribution::Normal(0.0, 1.0), &device);
                    let TensorPrimitive::Float(t) = t.into_primitive() else { unreachable!("a float") };
                    Flex::fp8_quantize(t, cast, orientation, None)
                };
                let x = quantized(m, cast(of_x), Orientation::Rows).rows.expect("asked for");
                let weights: Vec<_> = (0..count)
                    .map(|_| quantized(size, cast(of_w), Orientation::Cols).cols.expect("asked for"))
                    .collect();
                let product = |w: &_| {
                    let shape = burn::tensor::Shape::from(vec![m, size]);
                    let config = GemmConfig::default();
                    let dtype = burn::tensor::FloatDType::F32;
                    black_box(Flex::fp8_matmul(GemmRequest {
                        a: &x,
                        b: w,
                        bias: None,
                        groups: None,
                        shape,
                        dtype,
                        config,
                    }));
                };
                // One linear each, which keeps the FP8 copy of its weight.
                let linear = LinearConfig::new(size, size).with_bias(false);
                let (plain, float8) = (linear.init::<Flex>(&device), linear.init::<Float8<Flex>>(&device));
                let input = Tensor::<Flex, 2>::random([m, size], Distribution::Normal(0.0, 1.0), &device).into_data();
                let round = || {
                    let of_product = seconds(|| weights.iter().for_each(product)) / count as f64;
                    let [x, y] = [(); 2].map(|()| input.clone());
                    let x = Tensor::<Flex, 2>::from_data(x, &device);
                    let of_plain = seconds(|| drop(black_box(plain.forward(x))));
                    let x = Tensor::<Float8<Flex>, 2>::from_data(y, &device);
                    let of_float8 = seconds(|| drop(black_box(float8.forward(x))));
                    [of_product, of_plain, of_float8, stream([&left, &right])]
                };
                let rounds: Vec<_> = (0..repeat + 2).map(|_| round()).skip(2).collect();
                let middle = |i: usize| median(rounds.iter().map(|round| round[i]).collect());
                let (bandwidth, stream) = ((size * size) as f64 / middle(0) / 1e9, middle(3));
                let speedup = median(rounds.iter().map(|round| round[1] / round[2]).collect());
                let [us, rate, beside, share, speedup] =
                    [middle(0) * 1e6, bandwidth, stream, bandwidth / stream, speedup].map(number);
                table.row([name.into(), size.into(), m.into(), us, rate, beside, share, speedup]);
            }
        }
        set_default_config::<Float8<Flex>>(&device, None).expect("nothing to check");
    }
    table
}
