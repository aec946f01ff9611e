//! [`ShardPlan`]: memory of a sharded model on each rank, computed before allocation.
use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_float8::config::{Granularity, LinearInfo, Policy};
use burn_float8::shard_hooks::{self, visit_params};
use burn_float8::{Float8Config, Float8Error};
use serde::Serialize;

use crate::config::{Mesh, Reshard, ShardConfig};
use crate::error::ShardError;
use crate::gradients::JOINED_ELEMENTS;
use crate::place::module_of;
use crate::shardable::{check_expert_blocks, check_matmul};
use crate::sharding::{alignment, chunk};
use crate::tensor_parallel::{Divisible, ParallelPlan, TensorStyle, check_weights, styles, token_alignment};

/// Bytes per rank for a model and its AdamW training, without activations.
///
/// ```text
/// parameters, gradients     elements of this rank's rows and experts with padding, and of replicated ones
/// moments                   twice as many elements
/// masters                   elements of matrices, in f32
/// gathered, after_step      every weight that GEMMs read: codes and scales of both orientations, or values
/// gathered, after_forward   the two largest of them: one in use and one in flight
/// copies                    FP8 copies of weights that are whole on a rank: experts, and on one rank all;
///                           of the copies that are freed after each GEMM, only the largest
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ShardPlan {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of this rank's parameters.
    pub parameters: u64,
    /// Bytes of the trained parameters among them.
    pub trained: u64,
    /// Bytes of gradients.
    pub gradients: u64,
    /// Bytes of AdamW's two moments.
    pub moments: u64,
    /// Bytes of master parameters.
    pub masters: u64,
    /// Largest number of bytes of weights gathered from all ranks.
    pub gathered: u64,
    /// Bytes of the largest gradient before it is reduced over ranks.
    pub largest_gradient: u64,
    /// Largest number of bytes, in f32, of replicated parameters' gradients that one all-reduce
    /// sums.
    pub joined_gradients: u64,
    /// Bytes of FP8 copies, in both orientations, of weights that each rank keeps whole: experts,
    /// and in a single process all.
    pub copies: u64,
    /// Bytes of the copies whose codes a backend can share between orientations: one scale serves a
    /// tensor or a square.
    pub shared_copies: u64,
    /// Weights of linears in FP8, which may become FP8-only.
    pub fp8_weights: Fp8Weights,
    /// Average bytes that linears keep for backward per element of their inputs, on a CPU.
    pub input_bytes: f64,
    /// Elements that a rank trains of the largest parameter, and elements of the largest weight of
    /// a linear in FP8.
    pub largest: [u64; 2],
    /// Each rank's tokens must be a multiple of this, so that parts have whole blocks of their recipe.
    pub token_alignment: usize,
}

/// Bytes of matrices that are weights of linears in FP8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fp8Weights {
    /// Of the values, among the parameters.
    pub values: u64,
    /// Of the codes, if the weights are FP8-only.
    pub codes: u64,
    /// Of the kept copies.
    pub copies: u64,
}

/// Dtypes of a planned training. Parameters and gradients that are not matrices are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanDtypes {
    /// Dtype in which high-precision linears compute.
    pub compute: DType,
    /// Dtype of matrices and their gradients.
    pub matrices: DType,
    /// Dtype of AdamW's moments.
    pub moments: DType,
    /// Whether matrices also have f32 masters.
    pub masters: bool,
}

/// Assumed rows of an input, for the number of elements of its transpose that share a scale.
const INPUT_ROWS: usize = 1024;

/// Parameter of a model.
struct Planned {
    dims: Vec<usize>,
    kind: Kind,
    style: Option<TensorStyle>,
    is_trained: bool,
    /// Policy of a linear, with FP8.
    policy: Option<Policy>,
}

enum Kind {
    Linear(String),
    Embedding(String),
    Replicated,
}

impl ShardPlan {
    /// Plans `model` on a mesh, whose ranks of tensor parallelism divide it by `tensor`. Does not
    /// initialize lazy parameters. Parameters for whose names `is_trained` returns false have neither
    /// gradients nor moments.
    ///
    /// # Errors
    ///
    /// The errors of [`Float8Config::apply`]; for `tensor`, of
    /// [`TensorParallel::apply`](crate::TensorParallel::apply); linears that
    /// [`Sharded::apply`](crate::Sharded::apply) refuses.
    pub fn new<B: Backend, M: Module<B>>(
        model: &M,
        mesh: Mesh,
        tensor: &ParallelPlan,
        config: ShardConfig,
        float8: Option<&Float8Config>,
        dtypes: PlanDtypes,
        is_trained: &dyn Fn(&str) -> bool,
    ) -> Result<Self, ShardError> {
        let styles = styles::<B, M>(model, tensor)?;
        let mut parameters = parameters::<B, M>(model, &styles, float8, is_trained)?;
        let matrices = parameters.iter().filter(|parameter| parameter.dims.len() == 2);
        check_weights(&matrices.filter_map(Planned::divisible).collect::<Vec<_>>(), &styles, mesh.tensor)?;
        parameters.iter().try_for_each(|parameter| parameter.check(mesh, config))?;
        let (ranks, is_sum) = (mesh.shard, mesh.shard == 1 && mesh.replicate > 1);
        parameters.iter_mut().for_each(|parameter| parameter.divide(mesh.tensor));
        let divided = parameters.iter().filter(|parameter| parameter.style.is_some());
        let token_alignment = divided.filter_map(|parameter| parameter.policy.as_ref()).map(token_alignment).max();
        let mut new = Self { ranks: mesh.ranks(), token_alignment: token_alignment.unwrap_or(1), ..Self::default() };
        let (mut copies, mut largest_passing, mut replicated) = (vec![], 0, 0);
        // Sums over the inputs of linears: elements and bytes.
        let (mut elements_read, mut bytes_kept) = (0, 0.0);
        for parameter in &parameters {
            let dims = parameter.own_dims(ranks, config);
            let elements = dims.iter().product::<usize>() as u64;
            let kept = if parameter.dims.len() < 2 { DType::F32 } else { dtypes.matrices }.size() as u64;
            let policy = parameter.policy.as_ref();
            let is_sharded = parameter.is_sharded();
            let mut add = |own: u64| {
                new.parameters += kept * own;
                if !parameter.is_trained {
                    return;
                }
                new.largest[0] = new.largest[0].max(own);
                let is_divided = is_sharded || dims != parameter.dims && mesh.replicate == 1;
                if !is_divided || is_sum {
                    replicated += own;
                    new.joined_gradients = new.joined_gradients.max(4 * own);
                }
                new.trained += kept * own;
                new.gradients += kept * own;
                new.moments += 2 * dtypes.moments.size() as u64 * own;
                new.masters += 4 * own * u64::from(dtypes.masters && parameter.dims.len() > 1);
            };
            // Experts are concatenated, along n for one orientation and along k for the other.
            let (groups, [k, n]) = match dims[..] {
                [k, n] if is_sharded => (1, [k, n]),
                [groups, k, n] if policy.is_some() => (groups, [k, n]),
                _ => {
                    add(elements);
                    continue;
                }
            };
            let granularities = policy.map(shard_hooks::weight_granularities).unwrap_or_default();
            let size =
                |granularity: Granularity, [rows, k]: [usize; 2]| rows * k + 4 * granularity.scale_words(rows, k);
            if is_sharded {
                let rows = chunk(k, ranks, alignment(policy));
                add((rows * n) as u64);
                if let Some(granularity) = granularities[0] {
                    new.fp8_weights.values += kept * (rows * n) as u64;
                    new.fp8_weights.codes += size(granularity, [n, rows]) as u64;
                }
                if parameter.is_trained {
                    new.largest_gradient = new.largest_gradient.max(4 * elements);
                }
            } else {
                add(elements);
            }
            let [transposed, rows] = granularities;
            let float8 = [(transposed, [groups * n, k]), (rows, [groups * k, n])]
                .map(|(granularity, dims)| granularity.map(|granularity| size(granularity, dims) as u64));
            if float8.iter().any(Option::is_some) {
                new.largest[1] = new.largest[1].max(elements);
            }
            let is_kept = policy.is_none_or(shard_hooks::keeps_weight_copies);
            if !is_sharded || ranks == 1 {
                match is_kept {
                    true => {
                        let copies = float8.iter().flatten().sum::<u64>();
                        new.copies += copies;
                        new.fp8_weights.copies += if is_sharded { copies } else { 0 };
                    }
                    false => largest_passing = float8.into_iter().flatten().fold(largest_passing, u64::max),
                }
            }
            if let ([Some(one), Some(other)], true) = (granularities, is_kept && is_sharded && ranks == 1)
                && one == other
                && matches!(one, Granularity::Tensor | Granularity::Block128x128)
            {
                new.shared_copies += float8[1].unwrap_or_default();
            }
            if let Some(policy) = policy {
                let kept = shard_hooks::input_granularity(policy).map_or(dtypes.compute.size() as f64, |granularity| {
                    let [height, width] = granularity.group(k, INPUT_ROWS);
                    1.0 + 4.0 / (height * width) as f64
                });
                elements_read += k;
                bytes_kept += kept * k as f64;
            }
            if !is_sharded {
                continue;
            }
            let is_values = float8.contains(&None);
            let size = if matches!(parameter.kind, Kind::Embedding(_)) { kept } else { dtypes.compute.size() as u64 };
            copies.extend(float8.into_iter().flatten().chain(is_values.then_some(size * elements)));
        }
        new.joined_gradients = new.joined_gradients.max(4 * replicated.min(JOINED_ELEMENTS as u64));
        new.copies += largest_passing;
        new.input_bytes = match elements_read {
            0 => dtypes.compute.size() as f64,
            read => bytes_kept / read as f64,
        };
        copies.sort_unstable_by(|a, b| b.cmp(a));
        let alive = if config.reshard == Reshard::AfterStep { copies.len() } else { 2 };
        // A world of one gathers nothing.
        new.gathered = copies.iter().take(alive).sum::<u64>() * u64::from(ranks > 1);
        Ok(new)
    }
}

impl Planned {
    fn divisible(&self) -> Option<Divisible> {
        let (Kind::Linear(name) | Kind::Embedding(name), [.., k, n]) = (&self.kind, &self.dims[..]) else {
            return None;
        };
        let (info, align) = (LinearInfo { name: name.clone(), k: *k, n: *n }, alignment(self.policy.as_ref()));
        Some(Divisible { info, align, is_embedding: matches!(self.kind, Kind::Embedding(_)) })
    }

    /// Checks what [`Sharded::apply`](crate::Sharded::apply) checks of a linear.
    fn check(&self, mesh: Mesh, config: ShardConfig) -> Result<(), ShardError> {
        let (Some(policy), Some(Divisible { info, .. }), true) = (&self.policy, self.divisible(), mesh.ranks() > 1)
        else {
            return Ok(());
        };
        check_matmul(&info.name, policy)?;
        match self.dims[..] {
            [experts, _, _] if config.experts => check_expert_blocks(&info, policy, experts, mesh.shard),
            _ => Ok(()),
        }
    }

    /// Shape on a rank, before matrices are sharded.
    fn own_dims(&self, ranks: usize, config: ShardConfig) -> Vec<usize> {
        let mut dims = self.dims.clone();
        if let ([experts, _, _], true) = (&mut dims[..], config.experts && matches!(self.kind, Kind::Linear(_))) {
            *experts = chunk(*experts, ranks, 1);
        }
        dims
    }

    /// Keeps a rank's part by tensor parallelism.
    fn divide(&mut self, ranks: usize) {
        match (self.style, &mut self.dims[..]) {
            (Some(TensorStyle::Colwise), [.., len]) | (Some(TensorStyle::Rowwise), [len, _]) => *len /= ranks,
            _ => {}
        }
    }

    /// Whether ranks divide its rows. Experts are not matrices.
    fn is_sharded(&self) -> bool {
        self.dims.len() == 2 && !matches!(self.kind, Kind::Replicated)
    }
}

fn parameters<B: Backend, M: Module<B>>(
    model: &M,
    styles: &BTreeMap<String, TensorStyle>,
    float8: Option<&Float8Config>,
    is_trained: &dyn Fn(&str) -> bool,
) -> Result<Vec<Planned>, Float8Error> {
    let default = Float8Config::default();
    let mut planned = vec![];
    visit_params::<B, M>(model, |param| {
        let dims = param.shape.to_vec();
        let kind = match (param.linear_weight(float8.unwrap_or(&default)), param.path.embedding(dims.len())) {
            (Some(name), _) => Kind::Linear(name),
            (_, Some(name)) => Kind::Embedding(name),
            _ => Kind::Replicated,
        };
        let name = param.name();
        let (style, is_trained) = (styles.get(module_of(&name)).copied(), is_trained(&name));
        planned.push(Planned { dims, kind, style, is_trained, policy: None });
    });
    if let Some(float8) = float8 {
        let weights = planned.iter().filter_map(Planned::divisible).filter(|weight| !weight.is_embedding);
        let mut policies = float8.resolve(&weights.map(|weight| weight.info).collect::<Vec<_>>())?.into_iter();
        let linears = planned.iter_mut().filter(|parameter| matches!(parameter.kind, Kind::Linear(_)));
        linears.for_each(|linear| linear.policy = policies.next());
    }
    Ok(planned)
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::backend::Flex;
    use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
    use burn_float8::config::Float8LinearConfig;
    use burn_float8::{Float8, Recipe};

    use super::*;
    use crate::comm::Communicator;
    use crate::sharded::Sharded;

    #[derive(Module, Debug)]
    struct Net<B: Backend> {
        embedding: Embedding<B>,
        norm: LayerNorm<B>,
        up: Linear<B>,
        down: Linear<B>,
    }

    fn net() -> Net<Float8<Flex>> {
        let device = Default::default();
        Net {
            embedding: EmbeddingConfig::new(50, 40).init(&device),
            norm: LayerNormConfig::new(40).init(&device),
            up: LinearConfig::new(40, 144).with_bias(false).init(&device),
            down: LinearConfig::new(144, 40).with_bias(false).init(&device),
        }
    }

    fn mesh(shard: usize) -> Mesh {
        Mesh { replicate: 1, shard, tensor: 1 }
    }

    const F32: PlanDtypes =
        PlanDtypes { compute: DType::BF16, matrices: DType::F32, moments: DType::F32, masters: false };

    /// Halves everything but the two vectors of 40 elements.
    #[test]
    fn bf16_takes_half() {
        let plan = |dtypes| {
            ShardPlan::new::<Float8<Flex>, _>(&net(), mesh(1), &vec![], ShardConfig::default(), None, dtypes, &|_| true)
                .unwrap()
        };
        let (wide, narrow) = (plan(F32), plan(PlanDtypes { matrices: DType::BF16, moments: DType::BF16, ..F32 }));
        let expected = (wide.parameters + 2 * 4 * 40) / 2;
        assert_eq!((narrow.parameters, narrow.gradients), (expected, expected));
        assert_eq!(narrow.moments, wide.moments / 2);
        let with_masters = plan(PlanDtypes { masters: true, ..F32 });
        assert_eq!((wide.masters, with_masters.masters), (0, with_masters.moments / 2 - 4 * 2 * 40));
    }

    #[test]
    fn copies_that_are_not_kept_are_one_at_a_time() {
        let copies = |recompute| {
            let linear = Float8LinearConfig::new(Recipe::Blockwise);
            let config = Float8Config::from(linear.with_force_recompute_fp8_weight_in_bwd(recompute));
            let (model, config) = (net(), Some(&config));
            ShardPlan::new::<Float8<Flex>, _>(&model, mesh(1), &vec![], ShardConfig::default(), config, F32, &|_| true)
                .unwrap()
        };
        let (kept, passing) = (copies(false), copies(true));
        // Two weights of one size, each with copies for fprop and dgrad that share one scale.
        assert_eq!((kept.copies, kept.shared_copies), (4 * passing.copies, 2 * passing.copies));
        assert_eq!(passing.shared_copies, 0);
    }

    #[test]
    fn bytes_are_counted() {
        let plan = |ranks, reshard, float8: Option<&Float8Config>| {
            let config = ShardConfig { reshard, ..ShardConfig::default() };
            ShardPlan::new::<Float8<Flex>, _>(&net(), mesh(ranks), &vec![], config, float8, F32, &|_| true).unwrap()
        };
        let tensorwise = Float8Config::tensorwise();
        let four = plan(4, Reshard::AfterStep, Some(&tensorwise));
        // Rows of shards are multiples of 16: 50, 40 and 144 rows on 4 ranks become 16, 16 and 48.
        let own = 16 * 40 + 2 * 40 + 16 * 144 + 48 * 40;
        assert_eq!((four.parameters, four.gradients, four.moments), (4 * own, 4 * own, 8 * own));
        let copies = 4 * 50 * 40 + 4 * (40 * 144 + 4);
        assert_eq!((four.gathered, four.largest_gradient), (copies, 4 * 40 * 144));
        assert_eq!(four.joined_gradients, 4 * 2 * 40);
        let let_go = plan(4, Reshard::AfterForward, Some(&tensorwise));
        assert_eq!(let_go.gathered, 4 * 50 * 40 + 40 * 144 + 4);
        assert_eq!(plan(4, Reshard::AfterStep, None).gathered, 4 * 50 * 40 + 2 * 2 * 40 * 144);
        let blocks = plan(4, Reshard::AfterStep, Some(&Float8Config::new(Recipe::Blockwise)));
        assert_eq!(blocks.parameters, 4 * (16 * 40 + 2 * 40 + 128 * 144 + 128 * 40));
        let one = plan(1, Reshard::AfterStep, Some(&tensorwise));
        assert_eq!(one.gathered, 0);
        // `apply` agrees with the plan.
        let model = tensorwise.apply(net()).unwrap().0;
        let (_, sharded) = Sharded::apply(model, &Communicator::solo(), ShardConfig::default()).unwrap();
        assert_eq!(4 * sharded.summary().elements_per_rank, one.parameters);
    }
}
