//! A mixture of experts against a loop over tokens, in forward and backward, including experts
//! without tokens.

use burn::backend::{Autodiff, Flex};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::set_default_config;
use models::MoeConfig;
use models::moe::Moe;
use trainer::rng::Rng;

use crate::common::{Train, model, relative, tiny_with, values};

const H: usize = 24;
const INTERMEDIATE: usize = 40;

type Plain = Autodiff<Flex>;

fn layer<B: Backend>(num_experts: usize, num_experts_per_tok: usize, seed: u64) -> Moe<B> {
    let moe = Some(MoeConfig { num_experts, num_experts_per_tok });
    let config = tiny_with(|dims| {
        dims.hidden_size = H;
        dims.intermediate_size = INTERMEDIATE;
        dims.num_layers = 1;
        dims.moe = moe
    });
    model::<B>(config, seed).layers[0].moe.clone().unwrap()
}

fn normal<B: Backend>(shape: [usize; 2], seed: u64) -> Tensor<B, 2> {
    let mut rng = Rng::named(seed, "normal");
    let values: Vec<_> = (0..shape[0] * shape[1]).map(|_| rng.truncated_normal(4.0) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// Experts of each token, most likely first, sorted on the host.
fn chosen<B: Backend>(moe: &Moe<B>, x: &Tensor<B, 2>, per_token: usize) -> Vec<Vec<usize>> {
    let logits = x.clone().matmul(moe.router.weight.val());
    let experts = logits.dims()[1];
    let best = |row: &[f32]| {
        let mut order: Vec<_> = (0..experts).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order[..per_token].to_vec()
    };
    values(logits).chunks(experts).map(best).collect()
}

/// A mixture computed one token and one expert at a time.
fn token_by_token<B: Backend>(moe: &Moe<B>, x: Tensor<B, 2>, per_token: usize) -> Tensor<B, 2> {
    let experts = &moe.experts;
    let chosen = chosen(moe, &x, per_token);
    let rows = chosen.into_iter().enumerate().map(|(token, chosen)| {
        let x = x.clone().narrow(0, token, 1);
        let logits = x.clone().matmul(moe.router.weight.val());
        let logits = chosen.iter().map(|&e| logits.clone().narrow(1, e, 1)).collect();
        let p = softmax(Tensor::cat(logits, 1), 1);
        let expert = |(slot, &e): (usize, &usize)| {
            let of = |weight: &Tensor<B, 3>| weight.clone().narrow(0, e, 1).squeeze_dim::<2>(0);
            let [gate, up, down] =
                [&experts.gate_proj, &experts.up_proj, &experts.down_proj].map(|l| of(&l.weight.val()));
            let y = (silu(x.clone().matmul(gate)) * x.clone().matmul(up)).matmul(down);
            y * p.clone().narrow(1, slot, 1)
        };
        chosen.iter().enumerate().map(expert).reduce(|a, b| a + b).unwrap()
    });
    Tensor::cat(rows.collect(), 0)
}

/// y, and the gradients of Σ y ⊙ dy with respect to x, the router and the experts.
fn everything<B: burn::tensor::backend::AutodiffBackend>(
    moe: &Moe<B>,
    tokens: usize,
    forward: impl Fn(&Moe<B>, Tensor<B, 2>) -> Tensor<B, 2>,
) -> [Vec<f32>; 6] {
    let x = normal::<B>([tokens, H], 1).require_grad();
    let y = forward(moe, x.clone());
    let grads = (y.clone() * normal([tokens, H], 2)).sum().backward();
    let experts = &moe.experts;
    let [gate, up, down] = [&experts.gate_proj, &experts.up_proj, &experts.down_proj]
        .map(|linear| values(linear.weight.val().grad(&grads).expect("an expert's gradient")));
    let router = values(moe.router.weight.val().grad(&grads).expect("the router's gradient"));
    [values(y), values(x.grad(&grads).unwrap()), router, gate, up, down]
}

#[test]
fn a_mixture_is_the_sum_over_each_tokens_experts() {
    set_default_config::<Train>(&Default::default(), None).unwrap();
    let mut without_tokens = 0;
    for (tokens, experts, per_token) in [(1, 4, 2), (2, 8, 3), (7, 4, 2), (40, 4, 2), (3, 6, 1), (5, 3, 3), (9, 1, 1)] {
        let moe = layer::<Plain>(experts, per_token, 7);
        let expected = everything(&moe, tokens, |moe, x| token_by_token(moe, x, per_token));
        let plain = everything(&moe, tokens, |moe, x| moe.forward(x));
        // `grouped_linear` in high precision, with the same weights.
        let moe = layer::<Train>(experts, per_token, 7);
        let float8 = everything(&moe, tokens, |moe, x| moe.forward(x));
        let case = format!("{tokens} tokens, {per_token} of {experts} experts");
        for (i, name) in ["y", "dx", "router", "gate", "up", "down"].into_iter().enumerate() {
            if name == "router" && per_token == 1 {
                // The only probability is 1.
                assert!(plain[i].iter().chain(&float8[i]).all(|&g| g.abs() < 1e-6), "{case}: {name}");
                continue;
            }
            for found in [&plain[i], &float8[i]] {
                let error = relative(found, &expected[i]);
                assert!(error < 1e-5, "{case}: {name} {error:e}");
            }
        }
        let used: Vec<bool> = plain[5].chunks(INTERMEDIATE * H).map(|dw| dw.iter().any(|&g| g != 0.0)).collect();
        let x = normal::<Train>([tokens, H], 1);
        let routed = chosen(&moe, &x, per_token).concat();
        assert_eq!(used, (0..experts).map(|e| routed.contains(&e)).collect::<Vec<_>>(), "{case}");
        without_tokens += used.iter().filter(|used| !**used).count();
    }
    assert!(without_tokens > 3, "{without_tokens}");
}

#[test]
fn equal_scores_and_nan_move_every_row_somewhere() {
    let device = Default::default();
    let mut moe = layer::<Flex>(4, 2, 3);
    moe.router.weight = moe.router.weight.clone().map(|w| w.zeros_like());
    let x = normal::<Flex>([6, H], 4);
    let y = moe.forward(x.clone());
    assert!(
        relative(&values(y), &values(token_by_token(&moe, x.clone(), 2))) < 1e-5,
        "the first experts, as in the loop"
    );
    let nan = Tensor::cat(vec![Tensor::full([1, H], f32::NAN, &device), x.clone()], 0);
    let y = values(moe.forward(nan));
    assert!(y[..H].iter().all(|y| y.is_nan()), "the NaN of a token stays its own");
    assert!(relative(&y[H..], &values(token_by_token(&moe, x, 2))) < 1e-5);
}

#[test]
fn hidden_states_may_be_bf16() {
    let moe = layer::<Flex>(4, 2, 8);
    let x = normal::<Flex>([11, H], 9).cast(DType::BF16);
    let y = moe.forward(x.clone());
    assert_eq!(y.dtype(), DType::BF16);
    let expected = values(token_by_token(&moe, x.cast(DType::F32), 2));
    assert!(relative(&values(y.cast(DType::F32)), &expected) < 0.02);
}
