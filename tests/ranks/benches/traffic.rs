//! Bytes that a rank moves per step, compared with bf16 FSDP2; 4 ranks over MPI: `cargo bench
//! --bench traffic --features mpi`.
//!
//! ```text
//! FSDP2, param_dtype = bf16, reduce_dtype = f32, one micro-batch a step:
//! after_step      (reshard_after_forward = False)   one gather of 2 bytes an element
//! after_forward   (reshard_after_forward = True)    two
//! gradients                                         a reduce-scatter of 4 bytes an element
//! ```
use std::process::{Command, ExitCode};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_float8::{Float8Config, Recipe};
use float8_shard::{Communicator, Operation, ReduceDtype, Reshard, ShardConfig, Sharded, Traffic};
use ranks::B;

const RANKS: usize = 4;
const WIDTH: usize = 512;

/// Linears of two SwiGLUs in sequence.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Vec<Linear<B>>,
    down: Vec<Linear<B>>,
}

fn main() -> ExitCode {
    if std::env::var_os("OMPI_COMM_WORLD_RANK").is_some() {
        rank();
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let ranks = RANKS.to_string();
    let status = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks])
        .arg(program)
        .env("RAYON_NUM_THREADS", "1")
        .status()
        .expect("mpirun is installed (apt: openmpi-bin)");
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn rank() {
    let comm = Communicator::from_env().expect("mpirun has started this rank");
    if comm.rank() == 0 {
        println!("KiB that each of {RANKS} ranks sends in a step, of {} KiB of weights in f32", weights() * 4 / 1024);
        println!("| recipe | reshard | reduce | gathered | FSDP2 bf16 | ratio | gradients | amaxes |");
        println!("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |");
    }
    for recipe in Recipe::ALL {
        for (reshard, gathers, names) in
            [(Reshard::AfterStep, 1, "after_step"), (Reshard::AfterForward, 2, "after_forward")]
        {
            for (reduce_dtype, reduce) in [(ReduceDtype::F32, "f32"), (ReduceDtype::Bf16, "bf16")] {
                let traffic = step(&comm, recipe, ShardConfig { reshard, reduce_dtype, ..ShardConfig::default() });
                let kib = |operation| traffic.operation(operation).sent as f64 / 1024.0;
                let fsdp2 = (gathers * 2 * weights() / RANKS) as f64 / 1024.0;
                let (gathered, gradients) =
                    (kib(Operation::AllGather), kib(Operation::ReduceScatterSum) + kib(Operation::AllToAll));
                let (ratio, amaxes) = (gathered / fsdp2, kib(Operation::AllReduceMaxBits));
                if comm.rank() == 0 {
                    println!(
                        "| {recipe} | {names} | {reduce} | {gathered:.1} | {fsdp2:.1} | {ratio:.3} | {gradients:.1} | {amaxes:.2} |"
                    );
                }
            }
        }
    }
}

/// Elements of all weights.
fn weights() -> usize {
    4 * WIDTH * 3 * WIDTH
}

/// Traffic of a rank in the third step. The first two fill the histories and record the order of
/// gathers.
fn step(comm: &Communicator, recipe: Recipe, config: ShardConfig) -> Traffic {
    let device = Default::default();
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init::<B>(&device);
    B::seed(&device, 1);
    let net = Net {
        up: (0..2).map(|_| linear(WIDTH, 3 * WIDTH)).collect(),
        down: (0..2).map(|_| linear(3 * WIDTH, WIDTH)).collect(),
    };
    let net = Float8Config::new(recipe).apply(net).expect("the recipe fits").0;
    let (mut net, sharded) = Sharded::apply(net, comm, config).expect("all ranks have the same model");
    let mut optimizer = SgdConfig::new().init();
    let mut before = comm.traffic();
    for _ in 0..3 {
        before = comm.traffic();
        sharded.precompute_scales(&net);
        let mut x = Tensor::<B, 2>::ones([32, WIDTH], &device).require_grad();
        for (up, down) in net.up.iter().zip(&net.down) {
            x = down.forward(up.forward(x));
        }
        let mut grads = GradientsParams::from_grads(x.mean().backward(), &net);
        sharded.reduce_gradients(&net, &mut grads).expect("all ranks are there");
        net = optimizer.step(1e-3, net, grads);
    }
    comm.traffic().since(&before)
}
