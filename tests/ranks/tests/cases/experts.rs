//! Experts that ranks divide compute what one rank computes with all tokens.
use std::ops::Range;

use burn::prelude::*;
use burn::tensor::Distribution;
use burn_float8::nn::{Dispatched, dispatch};
use burn_float8::{Float8Config, GroupedLinear, Recipe};
use float8_shard::{Operation, ShardConfig, Sharded};
use ranks::{B, Inner, bits};

use super::world;

/// Experts, which neither two nor four ranks divide; of four ranks the last has none.
const EXPERTS: usize = 5;
/// Widths of the linears.
const K: usize = 128;
const N: usize = 256;

pub fn config() -> ShardConfig {
    ShardConfig { experts: true, ..ShardConfig::default() }
}

/// Two linears of each expert.
#[derive(Module, Debug)]
struct Mixture<B: Backend> {
    up: GroupedLinear<B>,
    down: GroupedLinear<B>,
}

impl<B: Backend> Mixture<B> {
    fn new(experts: usize, device: &B::Device) -> Self {
        B::seed(device, 3);
        let initializer = burn::nn::Initializer::Normal { mean: 0.0, std: 0.1 };
        let linear = |k, n| GroupedLinear::new(experts, k, n, &initializer, device);
        Self { up: linear(K, N), down: linear(N, K) }
    }

    /// The rows go to the ranks once, or for each linear.
    fn forward(&self, x: Tensor<B, 2>, ends: Tensor<B, 1, Int>, is_once: bool) -> Tensor<B, 2> {
        if !is_once {
            return self.down.forward(self.up.forward(x, ends.clone()), ends);
        }
        let Dispatched { x, ends, route } = dispatch(x, ends, &self.up.weight.val());
        route.combine(self.down.forward(self.up.forward(x, ends.clone()), ends))
    }
}

/// Rows of each expert on each rank.
struct Batches(Vec<Vec<usize>>);

impl Batches {
    fn new(ranks: usize, count: impl Fn(usize, usize) -> usize) -> Self {
        Self((0..ranks).map(|rank| (0..EXPERTS).map(|expert| count(rank, expert)).collect()).collect())
    }

    /// Rows of a rank among all rows, which are by expert and then by rank.
    fn rows(&self, rank: usize) -> Vec<i32> {
        let (mut next, mut rows) = (0, vec![]);
        for expert in 0..EXPERTS {
            for (of, counts) in self.0.iter().enumerate() {
                let all = next..next + counts[expert] as i32;
                next = all.end;
                if of == rank {
                    rows.extend(all);
                }
            }
        }
        rows
    }

    fn ends(counts: impl Iterator<Item = usize>) -> Tensor<B, 1, Int> {
        let ends = counts.scan(0, |end, count| {
            *end += count as i32;
            Some(*end)
        });
        Tensor::from_ints(&ends.collect::<Vec<_>>()[..], &Default::default())
    }
}

/// Some rows of a matrix.
fn select<T: Backend>(all: Tensor<T, 2>, rows: &[i32]) -> Tensor<T, 2> {
    let (device, [_, cols]) = (all.device(), all.dims());
    match rows.is_empty() {
        true => Tensor::zeros([0, cols], &device),
        false => all.select(0, Tensor::from_ints(rows, &device)),
    }
}

/// y, dx and the gradients of both weights.
struct Products {
    rows: [Tensor<Inner, 2>; 2],
    weights: [Tensor<Inner, 3>; 2],
}

fn products(
    mixture: &Mixture<B>,
    x: Tensor<B, 2>,
    dy: Tensor<B, 2>,
    ends: Tensor<B, 1, Int>,
    is_once: bool,
) -> Products {
    let x = x.detach().require_grad();
    let y = mixture.forward(x.clone(), ends, is_once);
    let grads = (y.clone() * dy.detach()).sum().backward();
    let weights = [&mixture.up, &mixture.down].map(|linear| linear.weight.val().grad(&grads).unwrap());
    Products { rows: [y.inner(), x.grad(&grads).unwrap()], weights }
}

/// Results are equal to the bit: no sum has another order.
pub fn codes_are_those_of_all_tokens() {
    let (comm, device) = (world(), Default::default());
    let (ranks, rank) = (comm.world_size(), comm.rank());
    burn_float8::set_default_config::<B>(&device, None).unwrap();
    let chunk = EXPERTS.div_ceil(ranks);
    let own: Range<usize> = (rank * chunk).min(EXPERTS)..((rank + 1) * chunk).min(EXPERTS);
    let some = |rank: usize, expert: usize| (7 * rank + 13 * expert) % 40;
    let cases = [
        ("some rows", Batches::new(ranks, some)),
        ("a rank without rows", Batches::new(ranks, |rank, expert| if rank == 1 { 0 } else { some(rank, expert) })),
        ("one expert", Batches::new(ranks, |rank, expert| if expert == 3 { 20 + rank } else { 0 })),
    ];
    for recipe in [None].into_iter().chain(Recipe::ALL.map(Some)) {
        let new = || {
            let mixture = Mixture::new(EXPERTS, &device);
            match recipe {
                Some(recipe) => Float8Config::new(recipe).apply(mixture).unwrap().0,
                None => mixture,
            }
        };
        for (name, batches) in &cases {
            let all = (0..EXPERTS).map(|expert| batches.0.iter().map(|counts| counts[expert]).sum());
            let ends = Batches::ends(all);
            let rows = ends.clone().max().into_scalar() as usize;
            let random = || Tensor::<B, 2>::random([rows, K], Distribution::Normal(0.0, 1.0), &device);
            B::seed(&device, 11);
            let (x, dy) = (random(), random());
            let whole = products(&new(), x.clone(), dy.clone(), ends, false);
            let of_rank = batches.rows(rank);
            for is_once in [true, false] {
                let (part, sharded) = Sharded::apply(new(), &comm, config()).unwrap();
                if is_once {
                    // Weights' amaxes are reduced here, else in each first cast.
                    sharded.precompute_scales(&part);
                }
                let [x, dy] = [&x, &dy].map(|t| select(t.clone(), &of_rank));
                let found = products(&part, x, dy, Batches::ends(batches.0[rank].iter().copied()), is_once);
                for (of, found, whole) in [("y", 0), ("dx", 1)].map(|(of, i)| (of, &found.rows[i], &whole.rows[i])) {
                    let expected = bits(select(whole.clone(), &of_rank));
                    assert!(bits(found.clone()) == expected, "{recipe:?}, {name}, {is_once}: {of} on rank {rank}");
                }
                for (of, found, whole) in
                    [("up", 0), ("down", 1)].map(|(of, i)| (of, &found.weights[i], &whole.weights[i]))
                {
                    assert_eq!(found.dims()[0], chunk);
                    if own.is_empty() {
                        continue;
                    }
                    let expected = bits(whole.clone().slice([own.clone()]));
                    let found = bits(found.clone().narrow(0, 0, own.len()));
                    assert!(found == expected, "{recipe:?}, {name}, {is_once}: {of} on rank {rank}");
                }
            }
        }
    }
}

/// One all-reduce has the amaxes of all weights.
pub fn amaxes_of_weights() {
    let (comm, device) = (world(), Default::default());
    let mixture = Float8Config::tensorwise().apply(Mixture::new(EXPERTS, &device)).unwrap().0;
    let (part, sharded) = Sharded::apply(mixture, &comm, config()).unwrap();
    let before = comm.traffic();
    let calls = || comm.traffic().since(&before).operation(Operation::AllReduceMaxBits).calls;
    sharded.precompute_scales(&part);
    assert_eq!(calls(), 1);
    let y = part.forward(Tensor::ones([EXPERTS, K], &device), Batches::ends([1; EXPERTS].into_iter()), true);
    // The inputs of both linears.
    assert_eq!(calls(), 3);
    // Frees the graph, which keeps the ranks.
    y.sum().backward();
}

/// Rows travel there and back, once for a mixture, and so do gradients. Weights never travel.
pub fn bytes_of_rows() {
    let (comm, device) = (world(), Default::default());
    let batches = Batches::new(comm.world_size(), |rank, expert| 3 + rank + 2 * expert);
    let own = &batches.0[comm.rank()];
    let chunk = EXPERTS.div_ceil(comm.world_size());
    let of_rank = |rank: usize| (rank * chunk).min(EXPERTS)..((rank + 1) * chunk).min(EXPERTS);
    let sent: usize = own.iter().sum();
    let received: usize = batches.0.iter().map(|counts| counts[of_rank(comm.rank())].iter().sum::<usize>()).sum();
    let stayed: usize = own[of_rank(comm.rank())].iter().sum();
    for (is_once, widths) in [(true, vec![[K, K]]), (false, vec![[K, N], [N, K]])] {
        let mixture = Float8Config::new(Recipe::Rowwise).apply(Mixture::new(EXPERTS, &device)).unwrap().0;
        let (part, _) = Sharded::apply(mixture, &comm, config()).unwrap();
        let x = Tensor::<B, 2>::ones([sent, K], &device).require_grad();
        let before = comm.traffic();
        part.forward(x, Batches::ends(own.iter().copied()), is_once).sum().backward();
        let traffic = comm.traffic().since(&before);
        let found = traffic.operation(Operation::AllToAll);
        let [wide, narrow] = [0, 1].map(|i| widths.iter().map(|widths| widths[i]).sum::<usize>());
        let bytes = |there: usize, back: usize| 4 * ((there + back) * (wide + narrow)) as u64;
        assert_eq!(found.calls, 4 * widths.len() as u64);
        assert_eq!(found.sent, bytes(sent, received));
        assert_eq!(found.received, bytes(received - stayed, sent - stayed));
        assert_eq!(traffic.operation(Operation::ReduceScatterSum).calls, 0);
        // Numbers of rows, by expert.
        let counts = traffic.operation(Operation::AllGather);
        assert_eq!((counts.calls, counts.sent), (widths.len() as u64, 4 * (EXPERTS * widths.len()) as u64));
    }
}
