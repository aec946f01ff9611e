//! Host time of launches compared with device time: the slower of the two bounds a step.
//!
//! ```text
//! issue    time until the calls return, without waiting for their work / calls
//! total    time until their work is done / calls
//! ```
//!
//! If both are equal, the host is the bottleneck. Tiny shapes have almost no work for the device.

use std::time::Instant;

use benches::linear::{float8_step, inputs, plain_step};
use benches::median;
use burn::tensor::{Distribution, Tensor};
use burn_float8::{Float8Config, Float8LinearConfig, Recipe};
use float8_kernels::{Format, GemmConfig, Granularity, scaled_gemm};
use serde_json::{Value, json};

use super::Bench;
use super::data::Values;
use super::linear::with_default;
use super::timing::Clock;
use crate::target::Target;

/// Live small tensors during a linear, like the scales and amaxes of a model.
const LIVE: usize = 2000;

/// Calls between two waits: few enough that a stream accepts them all without blocking.
const CALLS: usize = 50;

pub fn cases<T: Target>(bench: &mut Bench<'_>) {
    for shape @ [m, n, k] in bench.size.of(&[[64, 64, 64]], 3, &[[64, 64, 64], [1024, 1024, 1024], [4096, 4096, 4096]])
    {
        let dtype = T::compute_dtype();
        bench.case(&format!("host gemm {m}x{n}x{k}"), |clock| {
            let (client, table) = (T::client(), Values::new(Format::E4m3));
            let operand = |rows, seed| table.operand(&client, [rows, k], Granularity::Tensor, seed);
            let (a, b) = (operand(m, 0), operand(n, 1));
            scaled_gemm(&client, &a, &b, None, dtype.into(), GemmConfig::default())?;
            Ok(row::<T>(clock, "scaled GEMM", shape, || {
                let out = scaled_gemm(&client, &a, &b, None, dtype.into(), GemmConfig::default());
                drop(out.expect("it took these operands before"));
            }))
        });
        bench.case(&format!("host matmul {m}x{n}x{k}"), |clock| {
            let matrix =
                |shape| Tensor::<T::Backend, 2>::random(shape, Distribution::Default, &Default::default()).cast(dtype);
            let (a, b) = (matrix([m, k]), matrix([k, n]));
            Ok(row::<T>(clock, "Burn's matmul", shape, || drop(a.clone().matmul(b.clone()))))
        });
        for (live, what) in
            [(0, "linear, forward and backward, tensorwise"), (LIVE, "the same, with 2,000 small tensors alive")]
        {
            bench.case(&format!("host linear {m}x{k}x{n} tensorwise, {live} alive"), |clock| {
                with_default::<T>(&Float8LinearConfig::new(Recipe::Tensorwise).into());
                let client = T::client();
                // Sizes of one scale, of scales of 128 rows, and of scales of 1024.
                let alive: Vec<_> =
                    (0..live).map(|i| client.create_from_slice(&vec![0; [4, 512, 4096][i % 3]])).collect();
                let inputs = inputs::<T::Backend>([m, k, n], dtype);
                let row = row::<T>(clock, what, [m, k, n], || {
                    float8_step::<T::Backend>(inputs.clone());
                });
                drop(alive);
                with_default::<T>(&Float8Config::default());
                Ok(row)
            });
        }
        bench.case(&format!("host linear {m}x{k}x{n} plain"), |clock| {
            let inputs = inputs::<T::Backend>([m, k, n], dtype);
            Ok(row::<T>(clock, "linear, forward and backward, Burn's", [m, k, n], || {
                plain_step::<T::Backend>(inputs.clone());
            }))
        });
    }
}

/// Row with median times.
fn row<T: Target>(clock: Clock, what: &str, shape: [usize; 3], mut call: impl FnMut()) -> Value {
    let mut round = || {
        T::sync();
        let start = Instant::now();
        for _ in 0..CALLS {
            call();
        }
        let issue = start.elapsed();
        T::sync();
        [issue, start.elapsed()].map(|time| time.as_secs_f64() / CALLS as f64 * 1e6)
    };
    // Compiles the kernels and fills the memory pools.
    round();
    let rounds: Vec<_> = (0..clock.rounds()).map(|_| round()).collect();
    let [issue_microseconds, total_microseconds] =
        [0, 1].map(|i| median(rounds.iter().map(|round| round[i]).collect()));
    json!({
        "what": what, "shape": shape, "issue_microseconds": issue_microseconds, "total_microseconds": total_microseconds,
    })
}
