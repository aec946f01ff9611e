//! SwiGLU, RMSNorm, rotary positions and log-likelihoods as autodiff nodes: results and gradients
//! against f64 definitions.
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_float8::backend::Float8Backend;
use burn_float8::nn::{log_likelihood, rms_norm, rotary, swiglu};
use float8_kernels::reference::fused as reference;

use crate::on_cpu_and_wgpu;
use crate::support::linear::A;
use crate::support::operand::{tensor, values};
use crate::support::runtime::Flex;
use crate::support::{assert_near, normal};

/// A node, its definition in f64, and a tolerance relative to the largest value of each result.
struct Op {
    name: &'static str,
    /// Matrices of `cols` columns. The weight of RMSNorm is in f32, and the others in one dtype.
    inputs: Vec<Vec<f32>>,
    cols: usize,
    dy: Vec<f32>,
    want: Vec<Vec<f64>>,
    tolerance: f64,
}

const EPSILON: f64 = 1e-5;

/// Batch size, positions, heads and head size.
const HEADS: [usize; 4] = [2, 7, 3, 10];

fn angles() -> [Vec<f32>; 2] {
    let angle = |i: usize| (i / 5) as f32 * 0.3f32.powi((i % 5) as i32);
    [f32::cos, f32::sin].map(|function| (0..7 * 5).map(|i| function(angle(i))).collect())
}

/// Enough values for several tasks, and some whose exponentials overflow.
fn gates(len: usize) -> Vec<f32> {
    let special = [0.0, -0.0, 100.0, -100.0, 87.5, -87.5];
    special.into_iter().chain(normal(len, 1).into_iter().map(|x| 3.0 * x)).take(len).collect()
}

impl Op {
    fn swiglu([a, b, dy]: [Vec<f32>; 3], cols: usize) -> Self {
        let want = [vec![reference::swiglu(&a, &b)], reference::swiglu_backward(&a, &b, &dy).to_vec()].concat();
        Self { name: "swiglu", inputs: vec![a, b], cols, dy, want, tolerance: 1e-6 }
    }

    fn rms_norm([x, gamma, dy]: [Vec<f32>; 3]) -> Self {
        let y = reference::rms_norm(&x, &gamma, EPSILON);
        let want = [vec![y], reference::rms_norm_backward(&x, &gamma, &dy, EPSILON).to_vec()].concat();
        Self { name: "rms_norm", cols: gamma.len(), inputs: vec![x, gamma], dy, want, tolerance: 3e-6 }
    }

    fn rotary([x, dy]: [Vec<f32>; 2]) -> Self {
        let [cos, sin] = angles();
        let want = [(&x, false), (&dy, true)].map(|(x, back)| reference::rotary(x, [&cos, &sin], HEADS, back));
        Self { name: "rotary", inputs: vec![x], cols: HEADS[3], dy, want: want.into(), tolerance: 1e-6 }
    }

    fn log_likelihood(logits: Vec<f32>, dy: Vec<f32>) -> Self {
        let rows = dy.len();
        let width = logits.len() / rows;
        let (mut y, mut dl) = (vec![], vec![]);
        for ((row, logits), dy) in logits.chunks(width).enumerate().zip(&dy) {
            let log_sum = logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
            y.push(f64::from(logits[target(row, width)]) - log_sum);
            let onehot = |i| if i == target(row, width) { 1.0 } else { 0.0 };
            let gradient = |(i, l): (usize, &f32)| f64::from(*dy) * (onehot(i) - (f64::from(*l) - log_sum).exp());
            dl.extend(logits.iter().enumerate().map(gradient));
        }
        Self { name: "log_likelihood", inputs: vec![logits], cols: width, dy, want: vec![y, dl], tolerance: 2e-6 }
    }

    /// Compares the node's result and the gradients of its inputs with the definition.
    fn compare<B: AutodiffBackend>(&self, runtime: &str, dtype: DType, tolerance: f64) {
        let (cols, rows) = (self.cols, self.inputs[0].len() / self.cols);
        let what = format!("{} {rows}x{cols} on {runtime}", self.name);
        let leaf = |(i, values): (usize, &Vec<f32>)| {
            let leaf = tensor::<B, 2>(values.clone(), [values.len() / cols, cols]);
            let is_gamma = self.name == "rms_norm" && i == 1;
            (if is_gamma { leaf } else { leaf.cast(dtype) }).require_grad()
        };
        let leaves: Vec<_> = self.inputs.iter().enumerate().map(leaf).collect();
        let x = leaves[0].clone();
        let y = match self.name {
            "swiglu" => swiglu(x, leaves[1].clone()),
            "rms_norm" => rms_norm(x, leaves[1].clone().reshape([cols]), EPSILON),
            "rotary" => {
                let [cos, sin] = angles().map(|table| tensor::<B, 2>(table, [7, 5]));
                rotary(x.reshape(HEADS), cos, sin).reshape([rows, cols])
            }
            _ => {
                let ids: Vec<i32> = (0..rows).map(|row| target(row, cols) as i32).collect();
                log_likelihood(x, Tensor::from_data(TensorData::new(ids, [rows]), &Default::default()))
            }
        };
        assert_eq!(y.dtype(), dtype, "{what}");
        let shape = y.dims();
        let grads = (y.clone() * tensor::<B, 2>(self.dy.clone(), shape).cast(dtype)).sum().backward();
        let gradients = leaves.iter().map(|leaf| values(leaf.grad(&grads).expect("a gradient")));
        let got: Vec<_> = [values(y.inner())].into_iter().chain(gradients).collect();
        assert_eq!(got.len(), self.want.len(), "{what}");
        for (i, (got, want)) in got.iter().zip(&self.want).enumerate() {
            let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
            assert_near(&format!("{what}, result {i}"), got, &want, tolerance);
        }
    }
}

fn target(row: usize, width: usize) -> usize {
    row * 37 % width
}

fn definitions_on<B: Float8Backend>(runtime: &str) {
    let mut ops = vec![];
    for [rows, cols] in [[1, 9], [300, 257]] {
        let len = rows * cols;
        ops.push(Op::swiglu([gates(len), normal(len, 2), normal(len, 3)], cols));
    }
    // A gate of 1e30 by a small value is finite, and its derivative has the gate's magnitude.
    ops.push(Op::swiglu([vec![1e30, -1e30], vec![1e-25; 2], normal(2, 3)], 2));
    for [rows, width] in [[1, 1], [3, 5], [700, 96]] {
        let mut x = normal(rows * width, 4);
        // A row of zeros gives a row of zeros, with a gradient.
        x[..width].fill(0.0);
        ops.push(Op::rms_norm([x, normal(width, 5), normal(rows * width, 6)]));
    }
    let len = HEADS.iter().product();
    ops.push(Op::rotary([normal(len, 7), normal(len, 8)]));
    for [rows, width] in [[1, 1], [5, 3], [90, 700]] {
        let logits = normal(rows * width, 9).into_iter().map(|x| 4.0 * x).collect();
        ops.push(Op::log_likelihood(logits, normal(rows, 10)));
    }
    ops.iter().for_each(|op| op.compare::<A<B>>(runtime, DType::F32, op.tolerance));
}

#[test]
fn fused_operations_are_their_definitions() {
    on_cpu_and_wgpu!(definitions_on);
}

/// Operations on values that bf16 represents exactly.
fn in_bf16() -> [Op; 4] {
    let round = |len: usize, seed| values(tensor::<Flex, 1>(normal(len, seed), [len]).cast(DType::BF16));
    let [a, b, dy] = [1, 2, 3].map(|seed| round(600, seed));
    let len = HEADS.iter().product();
    [
        Op::swiglu([a.clone(), b, dy.clone()], 20),
        Op::rms_norm([a.clone(), normal(20, 4), dy]),
        Op::rotary([round(len, 5), round(len, 6)]),
        Op::log_likelihood(a, round(30, 7)),
    ]
}

/// Inputs and outputs are bf16; nothing in between is rounded to it. On a backend without `Float8`,
/// and in f64, Burn's operations give the same.
#[test]
fn fused_operations_in_other_dtypes_and_on_other_backends() {
    let ops = in_bf16();
    ops[..3].iter().for_each(|op| op.compare::<A<Flex>>("flex", DType::BF16, 4e-3));
    for op in ops {
        op.compare::<Autodiff<Flex>>("a plain backend", DType::F32, op.tolerance);
        op.compare::<A<Flex>>("flex in f64", DType::F64, op.tolerance);
    }
}
