//! Timing of batches of calls between two waits. Blocking work keeps the device busy until the host
//! has issued the calls, so that the time is the device's, not the host's.
//!
//! ```text
//! seconds of a call = (time of blocker and calls - time of the blocker alone) / calls
//! ```

use std::time::Instant;

use benches::median;
use burn::tensor::DType;
use cubecl::prelude::*;
use float8_kernels::{Format, GemmConfig, Granularity, Operand, scaled_gemm};

use crate::target::Target;

/// Target seconds of a batch: long compared with the wait at its end.
const BATCH: f64 = 0.03;

/// Maximum number of calls in a batch.
const MOST: usize = 500;

/// Times calls.
#[derive(Clone, Copy)]
pub struct Clock {
    repeat: u32,
    batch: f64,
    /// Calls of the warm-up batches: the first compiles, the second fills the memory pools, and the
    /// last determines the number of calls per batch.
    warm_up: [usize; 3],
    /// Rows, columns and contraction length of the GEMMs that keep the device busy.
    blocker: usize,
}

impl Clock {
    /// Clock with medians of `repeat` batches; short ones if `quick`.
    pub fn new(repeat: u32, quick: bool) -> Self {
        if quick {
            // A software device takes a second for the large ones.
            Self { repeat, batch: BATCH / 30.0, warm_up: [1; 3], blocker: 128 }
        } else {
            Self { repeat, batch: BATCH, warm_up: [1, 2, 8], blocker: 1024 }
        }
    }

    /// Number of repetitions for measurements that compute their own medians; odd.
    pub const fn rounds(&self) -> u32 {
        2 * self.repeat + 1
    }

    /// Median seconds of a call with each of the inputs in turn.
    pub fn rotate<T: Target, I>(&self, inputs: &[I], mut call: impl FnMut(&I)) -> f64 {
        self.seconds::<T>(|turn| call(&inputs[turn % inputs.len()]))
    }

    /// Median seconds of a call. `call` receives its number.
    pub fn seconds<T: Target>(&self, mut call: impl FnMut(usize)) -> f64 {
        let blocker = Blocker::<T>::new(self.batch, self.blocker);
        let mut turn = 0;
        // Seconds per call of the host, and of host and device.
        let mut batch = |calls: usize| {
            T::sync();
            let start = Instant::now();
            blocker.issue();
            let blocked = start.elapsed().as_secs_f64();
            for _ in 0..calls {
                call(turn);
                turn += 1;
            }
            let issued = start.elapsed().as_secs_f64() - blocked;
            T::sync();
            [issued, start.elapsed().as_secs_f64() - blocker.seconds].map(|seconds| (seconds / calls as f64).max(1e-9))
        };
        let [_, _, [issued, seconds]] = self.warm_up.map(&mut batch);
        // Number of calls that the host issues while the blocker keeps the device busy.
        let most = ((blocker.seconds / issued) as usize).clamp(1, MOST);
        let calls = ((self.batch / seconds) as usize).clamp(1, most);
        batch(calls);
        median((0..self.repeat).map(|_| batch(calls)[1]).collect())
    }
}

/// Emulated GEMMs that keep the device busy for about a batch.
struct Blocker<T: Target> {
    client: ComputeClient<T::Runtime>,
    operand: Operand,
    count: usize,
    seconds: f64,
}

impl<T: Target> Blocker<T> {
    fn new(batch: f64, side: usize) -> Self {
        let client = T::client();
        let operand = Operand {
            codes: client.create_from_slice(&vec![0; side * side]),
            inv_scale: client.create_from_slice(&1f32.to_le_bytes()),
            rows: side,
            k: side,
            format: Format::E4m3,
            granularity: Granularity::Tensor,
            power_of_two: false,
        };
        let mut blocker = Self { client, operand, count: 1, seconds: 0.0 };
        let time = |blocker: &Self| {
            T::sync();
            let start = Instant::now();
            blocker.issue();
            T::sync();
            start.elapsed().as_secs_f64()
        };
        time(&blocker);
        blocker.count = ((batch / time(&blocker).max(1e-6)) as usize).clamp(1, MOST);
        // The time of many GEMMs is not a multiple of one GEMM's time.
        time(&blocker);
        blocker.seconds = median((0..5).map(|_| time(&blocker)).collect());
        blocker
    }

    fn issue(&self) {
        let (config, out) = (GemmConfig { emulate: true, ..GemmConfig::default() }, DType::F32.into());
        for _ in 0..self.count {
            let product = scaled_gemm(&self.client, &self.operand, &self.operand, None, out, config);
            drop(product.expect("a device that is measured multiplies"));
        }
    }
}
