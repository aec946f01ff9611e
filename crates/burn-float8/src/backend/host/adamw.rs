//! AdamW step on the host: one in-place pass over the parameter, on all cores.
use std::borrow::Cow;

#[cfg(feature = "flex")]
use burn_backend::DType;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_std::bf16;
use float8_kernels::reference::adamw::round_stochastic;
use rayon::prelude::*;

use super::loops::TASK;
use super::vector::{narrow, vectorized, widen};
use super::{floats, read_f32, tensor_on};
use crate::backend::adamw::{AdamWRequest, AdamWResult, AdamWStep, AdamWTensors, RoundingKeys};

/// Elements widened to f32 at a time: the blocks stay in the L1 cache.
const BLOCK: usize = 512;

/// [`Float8Backend::adamw`](crate::backend::Float8Backend::adamw) on the host. Leaves the amax to
/// the cast.
pub(super) fn adamw<B: Backend>(request: AdamWRequest<B>) -> AdamWResult<B> {
    let AdamWRequest { step, tensors: AdamWTensors { mut param, moments: [mut first, mut second] }, grad, .. } =
        request;
    let dims: Vec<usize> = param.shape().to_vec();
    let bits = step.rounding.each_ref().map(|keys| keys.as_ref().map(|keys| Bits::new(keys, &dims)));
    let [mut own_param, mut own_first, mut own_second] = [vec![], vec![], vec![]];
    {
        let param = changed::<B>(&mut param, &mut own_param);
        let first = changed::<B>(&mut first, &mut own_first);
        let second = changed::<B>(&mut second, &mut own_second);
        all(&step, &bits, [param, first, second], &Read::new::<B>(&grad));
    }
    let stored = |tensor: FloatTensor<B>, own: Vec<f32>| match own.is_empty() {
        true => tensor,
        false => tensor_on::<B>(&tensor, own, tensor.shape(), tensor.dtype()),
    };
    let moments = [stored(first, own_first), stored(second, own_second)];
    AdamWResult { tensors: AdamWTensors { param: stored(param, own_param), moments }, amax: None }
}

/// Values to update.
enum Values<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

/// Values of a tensor, in place if the backend allows it, otherwise a copy in `own`.
fn changed<'a, B: Backend>(tensor: &'a mut FloatTensor<B>, own: &'a mut Vec<f32>) -> Values<'a> {
    #[cfg(feature = "flex")]
    if (&*tensor as &dyn core::any::Any).is::<burn_flex::FlexTensor>()
        && matches!(tensor.dtype(), DType::F32 | DType::BF16)
    {
        let in_place = (tensor as &mut dyn core::any::Any).downcast_mut::<burn_flex::FlexTensor>().expect("it is one");
        if !in_place.is_contiguous() {
            *in_place = in_place.to_contiguous();
        }
        let (start, end) = in_place.layout().contiguous_offsets().expect("it is contiguous");
        return match in_place.dtype() {
            DType::BF16 => Values::Bf16(&mut in_place.storage_mut::<bf16>()[start..end]),
            _ => Values::F32(&mut in_place.storage_mut::<f32>()[start..end]),
        };
    }
    *own = read_f32::<B>(tensor.clone());
    Values::F32(own)
}

impl<'a> Values<'a> {
    /// Splits the values into one part per task.
    fn tasks(self) -> Vec<Values<'a>> {
        match self {
            Self::F32(values) => values.chunks_mut(TASK).map(Values::F32).collect(),
            Self::Bf16(values) => values.chunks_mut(TASK).map(Values::Bf16).collect(),
        }
    }

    /// Reads values, starting at index `first`.
    #[inline(always)]
    fn load(&self, first: usize, block: &mut [f32]) {
        match self {
            Self::F32(values) => block.copy_from_slice(&values[first..][..block.len()]),
            Self::Bf16(values) => widen(&values[first..][..block.len()], block),
        }
    }

    /// Writes values from index `first` on, rounded stochastically with `noise` if given.
    #[inline(always)]
    fn store(&mut self, first: usize, block: &[f32], noise: Option<&[u16]>) {
        match (self, noise) {
            (Self::F32(values), None) => values[first..][..block.len()].copy_from_slice(block),
            (Self::F32(values), Some(noise)) => {
                for ((value, x), r) in values[first..][..block.len()].iter_mut().zip(block).zip(noise) {
                    *value = f32::from_bits(u32::from(round_stochastic(*x, *r)) << 16);
                }
            }
            (Self::Bf16(values), Some(noise)) => {
                for ((value, x), r) in values[first..][..block.len()].iter_mut().zip(block).zip(noise) {
                    *value = bf16::from_bits(round_stochastic(*x, *r));
                }
            }
            (Self::Bf16(values), None) => narrow(block, &mut values[first..][..block.len()]),
        }
    }
}

/// Values to read.
enum Read<'a> {
    F32(Cow<'a, [f32]>),
    #[cfg(feature = "flex")]
    Bf16(&'a [bf16]),
}

impl<'a> Read<'a> {
    fn new<B: Backend>(tensor: &'a FloatTensor<B>) -> Self {
        #[cfg(feature = "flex")]
        if let Some(tensor) = (tensor as &dyn core::any::Any).downcast_ref::<burn_flex::FlexTensor>()
            && let Some(values) = tensor.as_slice::<bf16>()
        {
            return Self::Bf16(values);
        }
        Self::F32(floats::<B>(tensor))
    }

    #[inline(always)]
    fn load(&self, first: usize, block: &mut [f32]) {
        match self {
            Self::F32(values) => block.copy_from_slice(&values[first..][..block.len()]),
            #[cfg(feature = "flex")]
            Self::Bf16(values) => widen(&values[first..][..block.len()], block),
        }
    }
}

/// Random bits of a tensor's elements.
struct Bits<'a> {
    /// Bits of indices of the last axis.
    last: &'a [u16],
    /// Bits of each row, in row order.
    rows: Vec<u16>,
}

impl<'a> Bits<'a> {
    fn new(keys: &'a RoundingKeys, dims: &[usize]) -> Self {
        let (rows, last) = keys.by_row(dims);
        Self { last, rows }
    }

    /// Bits of the elements, starting at `first`.
    #[inline(always)]
    fn fill(&self, first: usize, bits: &mut [u16]) {
        let (mut row, mut place) = (first / self.last.len(), first % self.last.len());
        let mut rest = bits;
        while !rest.is_empty() {
            let (part, after) = rest.split_at_mut(rest.len().min(self.last.len() - place));
            let of_row = self.rows[row];
            for (bits, key) in part.iter_mut().zip(&self.last[place..]) {
                *bits = of_row ^ key;
            }
            (row, place, rest) = (row + 1, 0, after);
        }
    }
}

fn all(step: &AdamWStep, bits: &[Option<Bits<'_>>; 3], [param, first, second]: [Values<'_>; 3], grad: &Read<'_>) {
    let tasks = param.tasks().into_par_iter().zip(first.tasks()).zip(second.tasks()).enumerate();
    tasks.for_each(|(task, ((param, first), second))| {
        vectorized!(part(step, bits, [param, first, second], task * TASK, grad));
    });
}

/// Step of the elements from index `begin` on, one for each of `values`.
#[inline(always)]
fn part(step: &AdamWStep, bits: &[Option<Bits<'_>>; 3], mut values: [Values<'_>; 3], begin: usize, grad: &Read<'_>) {
    let AdamWStep { lr, betas: [beta_1, beta_2], epsilon, decay, time, .. } = *step;
    let (factor_1, factor_2) = (1.0 - beta_1, 1.0 - beta_2);
    let [correction_1, correction_2] = step.corrections();
    let len = match &values[0] {
        Values::F32(values) => values.len(),
        Values::Bf16(values) => values.len(),
    };
    let (mut blocks, mut g, mut noise) = ([[0.0_f32; BLOCK]; 3], [0.0_f32; BLOCK], [0_u16; BLOCK]);
    for at in (0..len).step_by(BLOCK) {
        let count = BLOCK.min(len - at);
        for (values, block) in values.iter().zip(&mut blocks) {
            values.load(at, &mut block[..count]);
        }
        grad.load(begin + at, &mut g[..count]);
        let [param, first, second] = blocks.each_mut().map(|block| &mut block[..count]);
        let moments = first.iter_mut().zip(&mut *second).zip(&g);
        if time == 1 {
            for ((m, v), g) in moments {
                *m = g * factor_1;
                *v = g * g * factor_2;
            }
        } else {
            for ((m, v), g) in moments {
                *m = *m * beta_1 + g * factor_1;
                *v = *v * beta_2 + g * g * factor_2;
            }
        }
        if let Some(decay) = decay {
            for w in &mut *param {
                *w *= decay;
            }
        }
        for ((w, m), v) in param.iter_mut().zip(first).zip(second) {
            *w -= *m / correction_1 / ((*v / correction_2).sqrt() + epsilon) * lr;
        }
        for ((values, block), bits) in values.iter_mut().zip(&blocks).zip(bits) {
            let noise = bits.as_ref().map(|bits| {
                bits.fill(begin + at, &mut noise[..count]);
                &noise[..count]
            });
            values.store(at, &block[..count], noise);
        }
    }
}
