//! The fusion stream: same bits as without fusion, and threads that share a weight.
use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::module::linear;
use burn_float8::{Float8, backend::Float8Backend};

use crate::on_every_runtime;
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::runtime::{Eager, Fused, has_wgpu};

/// Linears between element-wise chains, which the fused backend compiles into single kernels.
fn chain<B: Float8Backend>() -> [Vec<f32>; 3] {
    type A<B> = Float8<Autodiff<B>>;
    let x = tensor::<A<B>, 2>(normal(16 * 64, 1), [16, 64]).require_grad();
    let w1 = tensor::<A<B>, 2>(normal(64 * 32, 2), [64, 32]).require_grad();
    let w2 = tensor::<A<B>, 2>(normal(32 * 16, 3), [32, 16]).require_grad();
    let h = linear(x.clone() * 0.5 + 1.0, w1.clone(), None) * 0.125;
    let h = (h.clone() * 0.25 + 0.5) * h;
    let y = linear(h, w2, None);
    let grads = (y.clone() * 3.0 - 1.0).mean().backward();
    [values(y), values(x.grad(&grads).unwrap()), values(w1.grad(&grads).unwrap())]
}

#[test]
fn fused_and_unfused_agree() {
    if !has_wgpu() {
        return;
    }
    let (fused, eager) = (chain::<Fused>(), chain::<Eager>());
    for ((name, fused), eager) in ["y", "dx", "dw"].iter().zip(&fused).zip(&eager) {
        assert_eq!(fused, eager, "{name}");
    }
}

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
