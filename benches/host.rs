//! What a linear costs the host on CUDA, without a GPU: Burn's fused CUDA backend on a runtime that launches nothing.
//!
//! ```text
//! host time = time until forward and backward return, and all launches are with the device's thread
//! per launch = host time / launches
//! ```

use std::time::Instant;

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, ModuleOps};
use burn::tensor::{DType, Distribution, Tensor};
use burn_cubecl::CubeBackend;
use burn_float8::{Float8, Float8Config, Float8Tensor, Recipe, set_default_config};
use burn_fusion::Fusion;
use codegen::device::{GenerateCuda, OfflineDevice, idle};
use serde::Serialize;

use crate::median;

/// What `burn::backend::Cuda` is, on another runtime.
type Cuda = Fusion<CubeBackend<GenerateCuda, f32, i32, u8>>;

/// M, K and N: what the host does for a launch is the same for all, but its memory stands in for the device's.
const SHAPE: [usize; 3] = [64, 64, 64];

/// Calls between two waits.
const CALLS: usize = 50;

/// One precision.
#[derive(Serialize)]
pub struct Row {
    precision: String,
    launches: f64,
    /// Median microseconds of forward and backward.
    microseconds: f64,
    /// Microseconds per launch, to plain Burn's.
    per_launch: f64,
}

fn step<B: ModuleOps<B> + Backend>(x: FloatTensor<B>, w: FloatTensor<B>, dy: FloatTensor<B>) {
    let y = B::linear(x.clone(), w.clone(), None);
    let dx = B::linear_x_backward(w, dy.clone());
    let dw = B::linear_weight_backward(x, dy);
    drop((y, dx, dw));
}

/// Microseconds and launches of a call.
fn measure(repeat: u32, mut call: impl FnMut()) -> [f64; 2] {
    let sync = || Cuda::sync(&OfflineDevice::default()).expect("nothing runs");
    let idle = idle();
    let mut round = || {
        sync();
        idle.take_launches();
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        sync();
        [start.elapsed().as_secs_f64() * 1e6, idle.take_launches() as f64].map(|sum| sum / CALLS as f64)
    };
    // The first rounds make the kernels' keys and fill the memory pools.
    round();
    round();
    let rounds: Vec<_> = (0..repeat).map(|_| round()).collect();
    [0, 1].map(|i| median(rounds.iter().map(|round| round[i]).collect()))
}

/// bf16, and every recipe that needs no layer.
pub fn rows(repeat: u32) -> Vec<Row> {
    let [m, k, n] = SHAPE;
    let device = OfflineDevice::default();
    let tensor = |shape: [usize; 2]| {
        Tensor::<Cuda, 2>::random(shape, Distribution::Default, &device).cast(DType::BF16).into_primitive().tensor()
    };
    let inputs = [tensor([m, k]), tensor([k, n]), tensor([m, n])];
    let plain = measure(repeat, || {
        let [x, w, dy] = inputs.clone();
        step::<Cuda>(x, w, dy);
    });
    let mut all = vec![("bf16".to_string(), plain)];
    for recipe in Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::Delayed) {
        let set = set_default_config::<Float8<Cuda>>(&device, Some(&Float8Config::new(recipe)));
        set.expect("a recipe without a history");
        let measured = measure(repeat, || {
            // New to the decorator: nothing is cast yet.
            let [x, w, dy] = inputs.clone().map(Float8Tensor::new);
            step::<Float8<Cuda>>(x, w, dy);
        });
        all.push((recipe.to_string(), measured));
    }
    let per_launch = |[microseconds, launches]: [f64; 2]| microseconds / launches;
    let row = |(precision, measured): (String, [f64; 2])| Row {
        precision,
        launches: measured[1],
        microseconds: measured[0],
        per_launch: per_launch(measured) / per_launch(plain),
    };
    all.into_iter().map(row).collect()
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!("\nhost time of a linear on CUDA, forward and backward with a new weight; nothing runs on a device");
    println!("{:<22}  {:>8}  {:>8}  {:>13}  {:>14}", "precision", "launches", "us", "us per launch", "to bf16's");
    for Row { precision, launches, microseconds, per_launch } in rows {
        let each = microseconds / launches;
        println!("{precision:<22}  {launches:>8.1}  {microseconds:>8.1}  {each:>13.2}  {per_launch:>14.2}");
    }
}
