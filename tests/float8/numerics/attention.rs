//! Attention as an autodiff node: result and gradients against the reference in f64.
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Int, Tensor, TensorData, module};
use burn_float8::{backend::Float8Backend, nn::attention};
use float8_kernels::reference::attention::{self as reference, Bounded, HostAttention};
use test_data::panic_of;

use crate::on_every_runtime;
use crate::support::linear::A;
use crate::support::normal;
use crate::support::operand::{tensor, values};
use crate::support::process::alone;
use crate::support::runtime::{Flex, Fused, has_wgpu};

/// Inputs of one call.
#[derive(Default)]
struct Case {
    name: &'static str,
    /// Batch size, heads and key heads.
    heads: [usize; 3],
    /// Queries and keys.
    positions: [usize; 2],
    /// Widths of keys and values.
    widths: [usize; 2],
    options: AttentionModuleOptions,
    /// Shape of the mask.
    mask: Option<[usize; 4]>,
    /// Shape of the bias.
    bias: Option<[usize; 4]>,
    has_documents: bool,
}

/// Document of a position. Each sequence has three documents, and the third repeats the number of
/// the first.
fn document(batch: usize, position: usize, positions: usize) -> i32 {
    [0, 1, 0][(3 * position / positions + usize::from(batch > 0 && position < 2)) % 3]
}

/// Values of a tensor that is broadcast to a larger shape.
fn expanded(values: Vec<f32>, [from, to]: [[usize; 4]; 2]) -> Vec<f32> {
    self::values(tensor::<Flex, 4>(values, from).expand(to))
}

impl Case {
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { heads: [batch, heads, kv_heads], positions: [queries, keys], widths: [dim, width], .. } = *self;
        [
            [batch, heads, queries, dim],
            [batch, kv_heads, keys, dim],
            [batch, kv_heads, keys, width],
            [batch, heads, queries, width],
        ]
    }

    /// q, k, v and dy, rounded to the dtype.
    fn inputs(&self, dtype: DType) -> [Vec<f32>; 4] {
        let mut seed = 0;
        self.shapes().map(|shape| {
            seed += 1;
            values(tensor::<Flex, 4>(normal(shape.iter().product(), seed), shape).cast(dtype))
        })
    }

    fn bias(&self) -> Option<Vec<f32>> {
        self.bias.map(|shape| normal(shape.iter().product(), 9))
    }

    /// Values of the mask: 1 hides a key.
    fn mask(&self) -> Option<Vec<f32>> {
        self.mask.map(|shape| (0..shape.iter().product()).map(|i: usize| f32::from(i * 7 % 5 == 1)).collect())
    }

    /// y, dq, dk and dv by the reference.
    fn expected(&self, [query, key, value, dy]: &[Vec<f32>; 4], rounding: f64) -> [Bounded; 4] {
        let Self { heads: [batch, heads, _], positions: [queries, keys], options, .. } = *self;
        let all = [batch, heads, queries, keys];
        let mask = self.mask().map(|mask| expanded(mask, [self.mask.unwrap(), all]));
        let is_hidden = |i: usize| {
            let (b, t, s) = (i / keys / queries / heads, i / keys % queries, i % keys);
            options.is_causal && s + queries > t + keys
                || mask.as_ref().is_some_and(|mask| mask[i] == 1.0)
                || self.has_documents && document(b, t, keys) != document(b, s, keys)
        };
        let [y, _lse, dq, dk, dv] = reference::attention(&HostAttention {
            query,
            key,
            value,
            dy,
            heads: self.heads,
            positions: self.positions,
            widths: self.widths,
            hidden: &(0..all.iter().product()).map(is_hidden).collect::<Vec<_>>(),
            bias: &self.bias().map(|bias| expanded(bias, [self.bias.unwrap(), all])).unwrap_or_default(),
            scale: options.scale.unwrap_or((self.widths[0] as f64).sqrt().recip()),
            softcap: options.softcap,
            rounding,
        });
        [y, dq, dk, dv]
    }

    /// y, dq, dk and dv of the node, by this crate's function or, with a mask or a bias, by Burn's.
    fn got<B: Float8Backend>(&self, inputs: &[Vec<f32>; 4], dtype: DType) -> [Vec<f32>; 4] {
        let device = Default::default();
        let mut shapes = self.shapes().into_iter();
        let [q, k, v, dy] =
            inputs.each_ref().map(|values| tensor::<A<B>, 4>(values.clone(), shapes.next().unwrap()).cast(dtype));
        let [q, k, v] = [q, k, v].map(|t| t.require_grad());
        let mask = self.mask.map(|shape| tensor::<A<B>, 4>(self.mask().unwrap(), shape).equal_elem(1.0));
        let bias = self.bias.map(|shape| tensor::<A<B>, 4>(self.bias().unwrap(), shape).cast(dtype));
        let y = if mask.is_some() || bias.is_some() {
            module::attention(q.clone(), k.clone(), v.clone(), mask, bias, self.options)
        } else {
            let documents = self.has_documents.then(|| {
                let [batch, keys] = [self.heads[0], self.positions[1]];
                let values: Vec<i32> = (0..batch * keys).map(|i| document(i / keys, i % keys, keys)).collect();
                Tensor::<A<B>, 2, Int>::from_data(TensorData::new(values, [batch, keys]), &device)
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
    let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let base = |name| Case { name, heads: [2, 4, 4], positions: [70; 2], widths: [16; 2], ..Case::default() };
    let base_causal = |name| Case { options: causal, ..base(name) };
    let with = |scale, softcap| AttentionModuleOptions { scale, softcap: Some(softcap), ..causal };
    vec![
        base("plain"),
        base_causal("causal"),
        Case { heads: [2, 4, 2], ..base_causal("grouped") },
        Case { heads: [1, 4, 1], ..base_causal("one key head") },
        Case { heads: [1, 2, 1], positions: [1100; 2], ..base_causal("many keys") },
        Case { positions: [5, 600], ..base_causal("more keys than queries") },
        Case { positions: [90, 20], ..base_causal("more queries than keys") },
        Case { heads: [2, 4, 2], positions: [1, 600], mask: Some([2, 1, 1, 600]), ..base_causal("one query") },
        Case { widths: [16, 24], ..base("wide values") },
        Case { heads: [1; 3], positions: [1; 2], widths: [1; 2], ..base_causal("one of each") },
        Case { heads: [2, 4, 2], has_documents: true, ..base_causal("documents") },
        Case { has_documents: true, ..base("documents both ways") },
        Case { options: with(Some(0.7), 1.5), ..base("softcap and scale") },
        Case { mask: Some([2, 4, 70, 70]), ..base("mask") },
        Case { mask: Some([2, 1, 70, 70]), ..base_causal("mask of all heads") },
        Case { mask: Some([2, 1, 1, 70]), ..base("mask of keys") },
        Case { mask: Some([1, 1, 70, 1]), ..base("mask of queries") },
        Case { bias: Some([1, 4, 70, 70]), ..base_causal("bias") },
        Case { bias: Some([2, 1, 1, 70]), options: with(None, 2.0), ..base("bias and softcap") },
    ]
}

/// Cases for devices, which compile kernels for each case.
const ON_DEVICES: [&str; 4] = ["documents", "mask of all heads", "bias and softcap", "one query"];

/// `rounding` is half a step of the dtype, relative.
fn check<B: Float8Backend>(runtime: &str, case: &Case, dtype: DType, rounding: f64) {
    let inputs = case.inputs(dtype);
    let (got, want) = (case.got::<B>(&inputs, dtype), case.expected(&inputs, rounding));
    for ((got, want), name) in got.iter().zip(&want).zip(["y", "dq", "dk", "dv"]) {
        let what = format!("{name} of {} in {dtype:?} on {runtime}", case.name);
        assert_eq!(got.len(), want.values.len(), "{what}");
        let (place, share) = want.worst(got);
        assert!(share <= 1.0, "{what}: [{place}] is {}, not {}", got[place], want.values[place]);
    }
}

fn definition_on<B: Float8Backend>(runtime: &str) {
    if runtime.starts_with("wgpu") && std::env::var("FLOAT8_ATTENTION").is_ok_and(|path| path == "tiles") {
        assert_eq!(B::fp8_facts(&Default::default()).attention, "tiles", "{runtime}");
    }
    for case in cases() {
        let is_on_devices = ON_DEVICES.contains(&case.name);
        if runtime == "flex" || is_on_devices {
            check::<B>(runtime, &case, DType::F32, 2f64.powi(-24));
        }
        if runtime == "flex" && is_on_devices {
            check::<B>(runtime, &case, DType::BF16, 2f64.powi(-8));
        }
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
    let dq = q.grad(&y.clone().sum().backward()).unwrap();
    for result in [y.inner(), dq] {
        let rows: Vec<_> = values(result).chunks(dim).map(|row| row.iter().all(|x| x.is_nan())).collect();
        let want: Vec<_> = (0..heads * positions).map(|row| (100..positions).contains(&row)).collect();
        assert_eq!(rows, want);
    }
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
