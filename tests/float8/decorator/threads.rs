//! Threads that share a weight, with fusion and without.
use burn::tensor::Tensor;
use burn::tensor::module::linear;
use burn_float8::{Float8, backend::Float8Backend};

use crate::on_every_runtime;
use crate::support::normal;
use crate::support::operand::{tensor, values};

fn threads_on<B: Float8Backend>(runtime: &str) {
    type F<B> = Float8<B>;
    let w: Tensor<F<B>, 2> = tensor(normal(64 * 32, 2), [64, 32]);
    let x: Tensor<F<B>, 2> = tensor(normal(16 * 64, 1), [16, 64]);
    let want = values(linear(x.clone(), w.clone(), None));
    let run = |shared: bool| {
        let (x, w) = (x.clone(), w.clone());
        move || {
            let x = if shared { x } else { x * 1.0 };
            (0..4).map(|_| values(linear(x.clone(), w.clone(), None))).collect::<Vec<_>>()
        }
    };
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|i| scope.spawn(run(i % 2 == 0))).collect();
        threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
    });
    assert!(outputs.iter().all(|y| *y == want), "{runtime}");
}

#[test]
fn threads_share_the_copies_of_a_weight() {
    on_every_runtime!(threads_on);
}
