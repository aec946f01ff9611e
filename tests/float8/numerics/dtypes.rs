//! x may be bf16 with an f32 master weight: y and dx have x's dtype, dw and db their parameter's.
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::embedding;
use burn::tensor::{DType, Int, Tensor};
use burn_float8::{Float8, Float8Config, report, without_float8};

use crate::support::linear::{A, forward_backward};
use crate::support::operand::tensor;
use crate::support::runtime::Flex;
use crate::support::{normal, sqnr};

type B = A<Flex>;

/// y, dx, dw and db.
fn run(linear: &Linear<B>, dtype: DType) -> Vec<Vec<f32>> {
    let values = |rows: usize, cols, seed| tensor::<B, 2>(normal(rows * cols, seed), [rows, cols]).cast(dtype);
    forward_backward::<Flex, 2>(linear, values(32, 48, 1), values(32, 24, 2))
}

fn assert_near(what: &str, ours: &[Vec<f32>], reference: &[Vec<f32>], floor: f64) {
    for (i, (ours, reference)) in ours.iter().zip(reference).enumerate() {
        let sqnr = sqnr(ours, reference);
        assert!(sqnr > floor, "{what} {i}: {sqnr} dB");
    }
}

#[test]
fn bf16_activations_with_f32_master_weights() {
    let linear = LinearConfig::new(48, 24).init::<B>(&Default::default());
    let exact = run(&linear, DType::F32);
    let fp8 = Float8Config::tensorwise().apply(linear).unwrap().0;
    let high = without_float8(fp8.clone());
    // The weights cast by hand, as plain Burn would need them.
    let by_hand = Linear {
        weight: high.weight.clone().map(|w| w.cast(DType::BF16).detach().require_grad()),
        bias: high.bias.clone().map(|b| b.map(|b| b.cast(DType::BF16).detach().require_grad())),
    };
    let [ours, high] = [&fp8, &high].map(|linear| run(linear, DType::BF16));
    assert_near("fp8", &ours[..3], &exact[..3], 18.0);
    assert_near("bf16", &high[..3], &run(&by_hand, DType::BF16)[..3], 60.0);
    // The bias gradient is a plain sum of dy, in the dtype of the bias. Only the rounding of dy to
    // bf16 shows.
    [ours, high].iter().for_each(|results| assert_near("db", &results[3..], &exact[3..], 40.0));
    // f64 has no FP8 cast: the linear runs in high precision, as its two copies did.
    assert_near("f64", &run(&fp8, DType::F64), &exact, 100.0);
    let totals = report(&fp8).layers[0].totals();
    assert_eq!((totals.emulated, totals.high_precision), (3, 9), "{totals:?}");
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
