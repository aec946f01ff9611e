//! Forward and backward of one linear.
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, Tensor};
use burn_float8::Float8;

use crate::medians;
use crate::table::{Table, number};

/// Returns a closure that measures forward and backward in milliseconds, the casts of x and w
/// included.
fn timed<B: AutodiffBackend>([m, k, n]: [usize; 3]) -> impl FnMut() -> f64 {
    let device = B::Device::default();
    let linear: Linear<B> = LinearConfig::new(k, n).with_bias(false).init(&device);
    let x = Tensor::<B, 2>::random([m, k], Distribution::Normal(0.0, 1.0), &device);
    move || {
        // New tensors of the same values, so that no cast is reused from the last repetition.
        let mut linear = linear.clone();
        linear.weight = linear.weight.map(|w| (w * 1.0).detach().require_grad());
        let x = (x.clone() * 1.0).detach().require_grad();
        B::sync(&device).expect("the device runs");
        let start = Instant::now();
        let grads = linear.forward(x.clone()).sum().backward();
        let (dx, dw) = (x.grad(&grads).expect("tracked"), linear.weight.grad(&grads).expect("tracked"));
        B::sync(&device).expect("the device runs");
        let time = start.elapsed().as_secs_f64() * 1e3;
        drop((dx, dw));
        time
    }
}

/// Table by shape.
pub fn table(repeat: u32) -> Table {
    let title = "linear on the CPU, forward + backward, tensorwise";
    let mut table = Table::new(title, &["M", "K", "N", "plain ms", "float8 ms", "ratio"]);
    for shape in [[1024, 256, 256], [1024, 256, 1024], [512, 1024, 1024]] {
        let [plain, float8] = medians(repeat, timed::<Autodiff<Flex>>(shape), timed::<Float8<Autodiff<Flex>>>(shape));
        let ([m, k, n], [plain_ms, float8_ms, ratio]) = (shape, [plain, float8, float8 / plain].map(number));
        table.row([m.into(), k.into(), n.into(), plain_ms, float8_ms, ratio]);
    }
    table
}
