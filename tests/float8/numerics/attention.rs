//! Attention as an autodiff node: result and gradients against the reference in f64.
use burn::backend::Autodiff;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, module};
use burn_float8::{Float8, backend::Float8Backend, nn::attention};
use float8_kernels::reference::attention::{self as reference, Bounded, HostAttention};
use test_data::panic_of;

use crate::on_every_runtime;
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::process::alone;
use crate::support::runtime::{Flex, Fused, has_wgpu};

type A<B> = Float8<Autodiff<B>>;

/// Inputs of one call.
#[derive(Clone, Default)]
struct Case {
    name: &'static str,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    width: usize,
    options: AttentionModuleOptions,
    /// Shape of the mask, which hides keys by `hides`.
    mask: Option<[usize; 4]>,
    /// Shape of the bias.
    bias: Option<[usize; 4]>,
    has_documents: bool,
}

/// Whether the mask hides an element, by its index in the mask.
fn hides(index: usize) -> bool {
    index * 7 % 5 == 1
}

/// Document of a position. Each sequence has three documents, and the third repeats the number of
/// the first.
fn document(batch: usize, position: usize, positions: usize) -> i32 {
    [0, 1, 0][(3 * position / positions + usize::from(batch > 0 && position < 2)) % 3]
}

/// Index of `[b, h, t, s]` in a tensor of this shape. Axes of size 1 are broadcast.
fn spread(shape: [usize; 4], at: [usize; 4]) -> usize {
    shape.into_iter().zip(at).fold(0, |index, (size, at)| index * size + if size == 1 { 0 } else { at })
}

/// Results of a call: y, dq, dk and dv.
type Results = [Vec<f32>; 4];

impl Case {
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { batch, heads, kv_heads, queries, keys, dim, width, .. } = *self;
        [
            [batch, heads, queries, dim],
            [batch, kv_heads, keys, dim],
            [batch, kv_heads, keys, width],
            [batch, heads, queries, width],
        ]
    }

    /// q, k, v and dy.
    fn inputs(&self) -> [Vec<f32>; 4] {
        let mut seed = 0;
        self.shapes().map(|shape| {
            seed += 1;
            normal(shape.iter().product(), seed)
        })
    }

    fn bias(&self) -> Option<Vec<f32>> {
        self.bias.map(|shape| normal(shape.iter().product(), 9))
    }

    /// Results by the reference.
    fn expected(&self, [query, key, value, dy]: &[Vec<f32>; 4], rounding: f64) -> [Bounded; 4] {
        let Self { batch, heads, kv_heads, queries, keys, dim, width, options, .. } = *self;
        let scores = (0..batch * heads * queries * keys).map(|i| {
            let at = i / keys;
            [at / queries / heads, at / queries % heads, at % queries, i % keys]
        });
        let scores: Vec<_> = scores.collect();
        let is_hidden = |at @ [b, _, t, s]: [usize; 4]| {
            options.is_causal && s + queries > t + keys
                || self.mask.is_some_and(|shape| hides(spread(shape, at)))
                || self.has_documents && document(b, t, keys) != document(b, s, keys)
        };
        let hidden: Vec<_> = scores.iter().map(|at| is_hidden(*at)).collect();
        let bias =
            self.bias.zip(self.bias()).map(|(shape, bias)| scores.iter().map(|at| bias[spread(shape, *at)]).collect());
        let bias: Vec<f32> = bias.unwrap_or_default();
        let [y, _lse, dq, dk, dv] = reference::attention(&HostAttention {
            query,
            key,
            value,
            dy,
            heads: [batch, heads, kv_heads],
            positions: [queries, keys],
            widths: [dim, width],
            hidden: &hidden,
            bias: &bias,
            scale: options.scale.unwrap_or((dim as f64).sqrt().recip()),
            softcap: options.softcap,
            rounding,
        });
        [y, dq, dk, dv]
    }

    /// Results of the node, by this crate's function or, with a mask or a bias, by Burn's.
    fn got<B: Float8Backend>(&self, inputs: &[Vec<f32>; 4], dtype: DType) -> Results {
        let device = Default::default();
        let mut shapes = self.shapes().into_iter();
        let [q, k, v, dy] =
            inputs.each_ref().map(|values| tensor::<A<B>, 4>(values.clone(), shapes.next().unwrap()).cast(dtype));
        let [q, k, v] = [q, k, v].map(|t| t.require_grad());
        let mask = self.mask.map(|shape| {
            let values: Vec<bool> = (0..shape.iter().product()).map(hides).collect();
            Tensor::<A<B>, 4, Bool>::from_data(TensorData::new(values, shape), &device)
        });
        let bias = self.bias.map(|shape| tensor::<A<B>, 4>(self.bias().unwrap(), shape).cast(dtype));
        let y = if mask.is_some() || bias.is_some() {
            module::attention(q.clone(), k.clone(), v.clone(), mask, bias, self.options)
        } else {
            let documents = self.has_documents.then(|| {
                let at = |i: usize| document(i / self.keys, i % self.keys, self.keys);
                let values: Vec<i32> = (0..self.batch * self.keys).map(at).collect();
                Tensor::<A<B>, 2, Int>::from_data(TensorData::new(values, [self.batch, self.keys]), &device)
            });
            attention(q.clone(), k.clone(), v.clone(), documents, self.options)
        };
        assert_eq!(y.dtype(), dtype);
        let grads = (y.clone() * dy).sum().backward();
        let [dq, dk, dv] = [q, k, v].map(|t| {
            let grad = t.grad(&grads).expect("a gradient");
            assert_eq!(grad.dtype(), dtype);
            values(grad)
        });
        [values(y.inner()), dq, dk, dv]
    }
}

fn cases() -> Vec<Case> {
    let base = Case { batch: 2, heads: 4, kv_heads: 4, queries: 70, keys: 70, dim: 16, width: 16, ..Case::default() };
    let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let base_causal = Case { options: causal, ..base.clone() };
    vec![
        Case { name: "plain", ..base.clone() },
        Case { name: "causal", ..base_causal.clone() },
        Case { name: "grouped", kv_heads: 2, ..base_causal.clone() },
        Case { name: "one key head", kv_heads: 1, batch: 1, ..base_causal.clone() },
        Case { name: "many keys", batch: 1, heads: 2, kv_heads: 1, queries: 1100, keys: 1100, ..base_causal.clone() },
        Case { name: "more keys than queries", queries: 5, keys: 600, ..base_causal.clone() },
        Case { name: "more queries than keys", queries: 90, keys: 20, ..base_causal.clone() },
        Case {
            name: "one query",
            queries: 1,
            keys: 600,
            kv_heads: 2,
            mask: Some([2, 1, 1, 600]),
            ..base_causal.clone()
        },
        Case { name: "wide values", width: 24, ..base.clone() },
        Case {
            name: "one of each",
            batch: 1,
            heads: 1,
            kv_heads: 1,
            queries: 1,
            keys: 1,
            dim: 1,
            width: 1,
            ..base_causal.clone()
        },
        Case { name: "documents", has_documents: true, kv_heads: 2, ..base_causal.clone() },
        Case { name: "documents both ways", has_documents: true, ..base.clone() },
        Case {
            name: "softcap and scale",
            options: AttentionModuleOptions { scale: Some(0.7), softcap: Some(1.5), ..causal },
            ..base.clone()
        },
        Case { name: "mask", mask: Some([2, 4, 70, 70]), ..base.clone() },
        Case { name: "mask of all heads", mask: Some([2, 1, 70, 70]), ..base_causal.clone() },
        Case { name: "mask of keys", mask: Some([2, 1, 1, 70]), ..base.clone() },
        Case { name: "mask of queries", mask: Some([1, 1, 70, 1]), ..base.clone() },
        Case { name: "bias", bias: Some([1, 4, 70, 70]), ..base_causal.clone() },
        Case {
            name: "bias and softcap",
            bias: Some([2, 1, 1, 70]),
            options: AttentionModuleOptions { softcap: Some(2.0), ..causal },
            ..base
        },
    ]
}

fn assert_close(what: &str, got: &Results, want: &[Bounded; 4]) {
    for ((got, want), name) in got.iter().zip(want).zip(["y", "dq", "dk", "dv"]) {
        assert_eq!(got.len(), want.values.len(), "{what}: {name}");
        let (place, share) = want.worst(got);
        assert!(share <= 1.0, "{what}: {name}[{place}] is {}, not {}", got[place], want.values[place]);
    }
}

/// Half a step of a dtype, relative.
const F32: f64 = 5.960_464_477_539_063e-8;
const BF16: f64 = 0.003_906_25;

/// Cases for devices, which compile kernels for each case.
const ON_DEVICES: [&str; 4] = ["documents", "mask of all heads", "bias and softcap", "one query"];

fn definition_on<B: Float8Backend>(runtime: &str) {
    if runtime.starts_with("wgpu") && std::env::var("FLOAT8_ATTENTION").is_ok_and(|path| path == "tiles") {
        assert_eq!(B::fp8_facts(&Default::default()).attention, "tiles", "{runtime}");
    }
    for case in cases().into_iter().filter(|case| runtime == "flex" || ON_DEVICES.contains(&case.name)) {
        let inputs = case.inputs();
        let want = case.expected(&inputs, F32);
        assert_close(&format!("{runtime}, {}", case.name), &case.got::<B>(&inputs, DType::F32), &want);
    }
}

#[test]
fn attention_is_its_definition() {
    on_every_runtime!(definition_on);
}

/// Kernels of devices give the same. A software adapter uses them only on request.
#[test]
fn attention_in_tiles() {
    if !has_wgpu() {
        return;
    }
    alone(module_path!(), "attention_in_tiles", &[("FLOAT8_ATTENTION", "tiles")], || {
        definition_on::<Fused>("wgpu fused");
    });
}

#[test]
fn attention_in_bf16() {
    for case in cases().into_iter().filter(|case| ON_DEVICES.contains(&case.name)) {
        let round = |x: Vec<f32>| {
            let len = x.len();
            values(tensor::<Flex, 1>(x, [len]).cast(DType::BF16))
        };
        let inputs = case.inputs().map(round);
        assert_close(case.name, &case.got::<Flex>(&inputs, DType::BF16), &case.expected(&inputs, BF16));
    }
}

/// Rows that attend to a NaN are NaN, and no others.
#[test]
fn a_nan_reaches_what_sees_it() {
    let [batch, heads, positions, dim] = [1, 2, 130, 8];
    let mut k = normal(batch * heads * positions * dim, 2);
    // Key 100 of the first head.
    k[100 * dim] = f32::NAN;
    let shape = [batch, heads, positions, dim];
    let [q, k, v] = [normal(k.len(), 1), k, normal(heads * positions * dim, 3)]
        .map(|values| tensor::<A<Flex>, 4>(values, shape).require_grad());
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let y = attention(q.clone(), k, v, None, options);
    let is_nan: Vec<bool> = values(y.clone().inner()).chunks(dim).map(|row| row.iter().all(|y| y.is_nan())).collect();
    let want: Vec<bool> = (0..heads * positions).map(|row| (100..positions).contains(&row)).collect();
    assert_eq!(is_nan, want);
    let dq = values(q.grad(&y.sum().backward()).unwrap());
    let is_nan: Vec<bool> = dq.chunks(dim).map(|row| row.iter().all(|dq| dq.is_nan())).collect();
    assert_eq!(is_nan, want);
}

/// The inner backend computes the gradient of a bias.
#[test]
fn a_bias_that_wants_a_gradient_gets_one() {
    let shape = [1, 2, 6, 4];
    let [q, k, v] = [1, 2, 3].map(|seed| tensor::<A<Flex>, 4>(normal(48, seed), shape));
    let bias = tensor::<A<Flex>, 4>(normal(72, 4), [1, 2, 6, 6]).require_grad();
    let y = module::attention(q, k, v, None, Some(bias.clone()), Default::default());
    let grad = bias.grad(&y.powf_scalar(2.0).sum().backward()).expect("a gradient");
    assert!(values(grad).iter().any(|x| *x != 0.0));
}

#[test]
fn f64_stays_f64() {
    let ones = || Tensor::<A<Flex>, 4>::ones([1, 2, 3, 4], &Default::default()).cast(DType::F64);
    assert_eq!(module::attention(ones(), ones(), ones(), None, None, Default::default()).dtype(), DType::F64);
    let keys = ones().slice([0..1, 0..1, 0..3, 0..4]);
    let y = attention(ones(), keys.clone(), keys, None, Default::default());
    assert_eq!((y.dtype(), y.dims()), (DType::F64, [1, 2, 3, 4]));
}

#[test]
fn shapes_that_do_not_fit() {
    let device = Default::default();
    let q = [2, 4, 6, 8];
    for (k, v, documents) in [
        ([2, 3, 6, 8], [2, 3, 6, 8], None),
        ([2, 0, 6, 8], [2, 0, 6, 8], None),
        ([1, 4, 6, 8], [1, 4, 6, 8], None),
        ([2, 4, 6, 7], [2, 4, 6, 8], None),
        ([2, 4, 5, 8], [2, 4, 6, 8], None),
        ([2, 4, 0, 8], [2, 4, 0, 8], None),
        ([2, 4, 5, 8], [2, 4, 5, 8], Some([2, 6])),
        ([2, 4, 6, 8], [2, 4, 6, 8], Some([1, 6])),
    ] {
        let [query, key, value] = [q, k, v].map(|shape| Tensor::<A<Flex>, 4>::zeros(shape, &device));
        let ids = documents.map(|shape| Tensor::<A<Flex>, 2, Int>::zeros(shape, &device));
        let message = panic_of(|| drop(attention(query, key, value, ids, Default::default())));
        let want = format!("attention of query {q:?}, key {k:?}, value {v:?} and documents {documents:?}: ");
        assert!(message.starts_with(&want), "{message}");
    }
}
