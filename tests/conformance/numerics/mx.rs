//! MXFP8: what the recipes promise on a linear of usual size.
use burn::backend::Autodiff;
use burn_float8::{Float8Config, Recipe, report};

use crate::support::linear::{forward_backward, layer};
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, sqnr};

/// Against f32 on x `[1024, 1024]` and w `[1024, 2048]`, normal: 27, 25 and 24 dB of y, dx and dw, 34 of a dw whose GEMM is
/// in high precision.
#[test]
fn a_linear_keeps_its_signal() {
    let [m, k, n] = [1024, 1024, 2048];
    let (x, w, dy) = (normal(m * k, 1), normal(k * n, 2), normal(m * n, 3));
    let load = |values: &[f32], shape| tensor::<Autodiff<Flex>, 2>(values.to_vec(), shape).require_grad();
    let (x_hp, w_hp) = (load(&x, [m, k]), load(&w, [k, n]));
    let y_hp = x_hp.clone().matmul(w_hp.clone());
    let grads = (y_hp.clone() * load(&dy, [m, n])).sum().backward();
    let exact = [values(y_hp), values(x_hp.grad(&grads).unwrap()), values(w_hp.grad(&grads).unwrap())];
    for (recipe, floors) in [(Recipe::Mxfp8, [27.0, 25.0, 24.0]), (Recipe::Mxfp8WgradWithHp, [27.0, 25.0, 34.0])] {
        let layer = layer::<Flex>(&Float8Config::new(recipe), tensor(w.clone(), [k, n]), None);
        let ours = forward_backward(&layer, tensor(x.clone(), [m, k]), tensor::<_, 2>(dy.clone(), [m, n]));
        let calls = report(&layer).layers[0].gemms().map(|(_, gemm)| [gemm.emulated, gemm.high_precision]);
        let wgrad = if recipe == Recipe::Mxfp8 { [1, 0] } else { [0, 1] };
        assert_eq!(calls, [[1, 0], [1, 0], wgrad], "{recipe}");
        for (((what, ours), exact), floor) in ["y", "dx", "dw"].iter().zip(&ours).zip(&exact).zip(floors) {
            let sqnr = sqnr(ours, exact);
            println!("{recipe} {what}: {sqnr:.1} dB");
            assert!(sqnr >= floor, "{recipe} {what}: {sqnr} dB");
        }
    }
}
