//! Host time of a linear on CUDA without a GPU: Burn's CUDA backend on a runtime that launches
//! nothing.
//!
//! Fusion is excluded: it adds a third thread to the caller's and the device's. All three spin
//! while they wait, so on two cores the times would measure the scheduler.
//!
//! ```text
//! host time = time until forward and backward return, and all launches are with the device's thread
//! per launch = host time / launches
//! ```

use std::time::Instant;

use benches::linear::{float8_step, inputs, plain_step};
use benches::{median, table::Table};
use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_float8::config::SelfCheck;
use burn_float8::{Float8, Float8Config, Recipe, set_default_config};
use codegen::device::{GenerateCuda, OfflineDevice, idle};
use serde_json::json;

/// `burn::backend::Cuda` without fusion, on a runtime that needs no GPU.
type Cuda = CubeBackend<GenerateCuda, f32, i32, u8>;

/// M, K and N, large enough that codes and scales come from different memory pools, as in a model.
const SHAPE: [usize; 3] = [1024, 1024, 1024];

/// Calls between two waits, which form a round.
const CALLS: usize = 50;

/// Rounds per requested repetition, as one takes milliseconds.
const ROUNDS: u32 = 5;

/// Warm-up rounds.
const WARM_UP: u32 = 2;

/// Numbers of live tensors of one element. CubeCL's memory pool visits every live allocation for a
/// new one.
const LIVE: [usize; 2] = [0, 2000];

/// Microseconds and launches per call, averaged over a round.
fn measure(mut call: impl FnMut()) -> [f64; 2] {
    let sync = || Cuda::sync(&OfflineDevice::default()).expect("nothing runs");
    let idle = idle();
    sync();
    idle.take_launches();
    let start = Instant::now();
    (0..CALLS).for_each(|_| call());
    sync();
    [start.elapsed().as_secs_f64() * 1e6, idle.take_launches() as f64].map(|sum| sum / CALLS as f64)
}

/// Table of bf16 and of every recipe that needs no layer, with and without live tensors.
pub fn table(repeat: u32) -> Table {
    let title = "host time of a linear on CUDA, forward and backward with a new weight; nothing runs on a device";
    let mut table = Table::new(title);
    LIVE.into_iter().for_each(|live| rows_beside(&mut table, live, repeat));
    table
}

/// Measures all precisions in turn, so that other load on the machine slows them equally.
fn rows_beside(table: &mut Table, live_tensors: usize, repeat: u32) {
    let device = OfflineDevice::default();
    let _live: Vec<_> = (0..live_tensors).map(|_| Tensor::<Cuda, 1>::zeros([1], &device)).collect();
    let inputs = inputs::<Cuda>(SHAPE, DType::BF16);
    let recipes: Vec<_> = Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::Delayed).collect();
    let round = || {
        let plain = measure(|| plain_step::<Cuda>(inputs.clone()));
        let quantized = recipes.iter().map(|recipe| {
            let set = set_default_config::<Float8<Autodiff<Cuda>>>(
                &device,
                Some(&Float8Config::new(*recipe).with_self_check(SelfCheck::Off)),
            );
            set.expect("a recipe without a history");
            measure(|| float8_step::<Cuda>(inputs.clone()))
        });
        [plain].into_iter().chain(quantized).collect::<Vec<_>>()
    };
    // The first rounds create the kernels' keys and fill the memory pools.
    let rounds: Vec<_> = (0..WARM_UP + ROUNDS * repeat).map(|_| round()).skip(WARM_UP as usize).collect();
    let names = ["bf16".to_string()].into_iter().chain(recipes.iter().map(ToString::to_string));
    for (i, precision) in names.enumerate() {
        let per_launch = |[microseconds, launches]: [f64; 2]| microseconds / launches;
        let ratios = rounds.iter().map(|round| per_launch(round[i]) / per_launch(round[0])).collect();
        let [microseconds, launches] = [0, 1].map(|j| median(rounds.iter().map(|round| round[i][j]).collect()));
        let [low, middle, high] = quartiles(ratios);
        table.rows.push(json!({
            "live tensors": live_tensors, "precision": precision, "launches": launches, "us": microseconds,
            "us per launch": microseconds / launches, "to bf16's": middle, "quartiles": format!("{low:.2}, {high:.2}"),
        }));
    }
}

/// Quartiles of the values.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}
