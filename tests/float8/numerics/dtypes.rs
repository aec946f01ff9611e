//! x may be bf16 with an f32 master weight: y and dx have x's dtype, dw and db their parameter's.
use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::embedding;
use burn::tensor::{DType, Int, Tensor};
use burn_float8::{Float8, Float8Config, report, without_float8};

use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{normal, sqnr};

type B = Float8<Autodiff<Flex>>;

struct Run {
    y: Tensor<B, 2>,
    dx: Tensor<Float8<Flex>, 2>,
    dw: Tensor<Float8<Flex>, 2>,
    db: Tensor<Float8<Flex>, 1>,
}

fn run(linear: &Linear<B>, dtype: DType) -> Run {
    let x = tensor::<B, 2>(normal(32 * 48, 1), [32, 48]).cast(dtype).detach().require_grad();
    let y = linear.forward(x.clone());
    let dy = tensor::<B, 2>(normal(32 * 24, 2), [32, 24]).cast(dtype);
    let grads = (y.clone() * dy).sum().backward();
    let (weight, bias) = (linear.weight.val(), linear.bias.as_ref().unwrap().val());
    let [dx, dw] = [x.grad(&grads).unwrap(), weight.grad(&grads).unwrap()];
    Run { y, dx, dw, db: bias.grad(&grads).unwrap() }
}

#[test]
fn bf16_activations_with_f32_master_weights() {
    let linear = LinearConfig::new(48, 24).init::<B>(&Default::default());
    let exact = run(&linear, DType::F32);
    let fp8 = Float8Config::tensorwise().apply(linear.clone()).unwrap().0;
    let high = without_float8(fp8.clone());
    // The weights cast by hand, as plain Burn would need them.
    let mut by_hand = high.clone();
    by_hand.weight = by_hand.weight.map(|w| w.cast(DType::BF16).detach().require_grad());
    by_hand.bias = by_hand.bias.map(|b| b.map(|b| b.cast(DType::BF16).detach().require_grad()));
    let by_hand = run(&by_hand, DType::BF16);
    for (name, run, reference, floor) in
        [("fp8", run(&fp8, DType::BF16), &exact, 18.0), ("bf16", run(&high, DType::BF16), &by_hand, 60.0)]
    {
        let dtypes = [run.y.dtype(), run.dx.dtype(), run.dw.dtype(), run.db.dtype()];
        assert_eq!(dtypes, [DType::BF16, DType::BF16, DType::F32, DType::F32], "{name}");
        for (what, ours, reference) in [
            ("y", values(run.y), values(reference.y.clone())),
            ("dx", values(run.dx), values(reference.dx.clone())),
            ("dw", values(run.dw), values(reference.dw.clone())),
        ] {
            let sqnr = sqnr(&ours, &reference);
            assert!(sqnr > floor, "{name} {what}: {sqnr} dB");
        }
        // The bias gradient is a plain sum of dy, in the dtype of the bias. Only the rounding of dy
        // to bf16 shows.
        assert!(sqnr(&values(run.db), &values(exact.db.clone())) > 40.0, "{name} db");
    }
    let layer = &report(&fp8).layers[0];
    assert_eq!(layer.totals().emulated, 3, "{layer:?}");
}

/// f64 has no FP8 cast: the linear runs in high precision, and the report gives the reason.
#[test]
fn dtypes_without_a_cast_run_in_high_precision_and_say_so() {
    let linear = LinearConfig::new(8, 4).with_bias(false).init::<B>(&Default::default());
    let linear = Float8Config::tensorwise().apply(linear).unwrap().0;
    let x = tensor::<B, 2>(normal(16, 3), [2, 8]);
    let y = linear.forward(x.clone().cast(DType::F64));
    assert_eq!(y.dtype(), DType::F64);
    let exact = values(x.matmul(linear.weight.val()));
    assert!(sqnr(&values(y), &exact) > 100.0);
    let fprop = report(&linear).layers[0].fprop.clone();
    assert_eq!((fprop.emulated, fprop.high_precision), (0, 1));
    assert_eq!(fprop.reason.as_deref(), Some("dtype F64"));
}

/// One token many times: a bf16 sum would stop at 256 times the addend.
#[test]
fn a_table_in_bf16_has_the_sum_of_many_tokens() {
    let device = Default::default();
    let table = Tensor::<B, 2>::zeros([4, 8], &device).cast(DType::BF16).detach().require_grad();
    let tokens = Tensor::<B, 2, Int>::ones([2, 1504], &device);
    let y = embedding(table.clone(), tokens);
    assert_eq!(y.dtype(), DType::BF16);
    let gradient = table.grad(&y.sum().backward()).unwrap();
    assert_eq!(gradient.dtype(), DType::BF16);
    let expected = Tensor::<Float8<Flex>, 2>::from_data([[0.0], [3008.0], [0.0], [0.0]], &device).expand([4, 8]);
    // 3,008 is exact in bf16.
    assert!(gradient.cast(DType::F32).equal(expected).all().into_scalar());
}
