//! Many small tensors reduced over all ranks by one all-reduce, on the memory of their device where it can, else over the host's.
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::seam::read_f32;
use burn_std::{Shape, Slice};
use float8_comm::{CommError, Communicator};

use crate::collectives::DeviceCollectives;

/// What becomes of the values of all ranks.
#[derive(Clone, Copy)]
pub(crate) enum Reduction {
    /// In f32.
    Sum,
    /// The largest of values that are not negative; NaN wins.
    Max,
}

/// The reductions of tensors `[n]` in f32, of which all ranks have as many of the same lengths. With `collectives` the host waits for
/// nothing.
pub(crate) fn all_reduce<B: Float8Backend>(
    comm: &Communicator,
    collectives: Option<&dyn DeviceCollectives<B>>,
    label: &str,
    reduction: Reduction,
    own: Vec<FloatTensor<B>>,
) -> Result<Vec<FloatTensor<B>>, CommError> {
    let lens: Vec<usize> = own.iter().map(|t| t.shape()[0]).collect();
    if let Some(collectives) = collectives {
        let own = join::<B>(own);
        let all = match reduction {
            Reduction::Sum => collectives.all_reduce_sum(label, own)?,
            Reduction::Max => collectives.all_reduce_max(label, own)?,
        };
        return Ok(split::<B>(all, &lens));
    }
    // A model may lie on several devices: each run of tensors on one of them is read at once.
    let runs: Vec<_> = own.chunk_by(|a, b| B::float_device(a) == B::float_device(b)).collect();
    let mut values: Vec<Vec<f32>> = runs.iter().map(|run| read_f32::<B>(join::<B>(run.to_vec()))).collect();
    let lens_of_runs: Vec<_> = values.iter().map(Vec::len).collect();
    let own_values = if values.len() == 1 { values.remove(0) } else { values.concat() };
    let all = match reduction {
        Reduction::Sum => comm.all_reduce_sum(label, own_values)?.wait()?,
        Reduction::Max => {
            let bits = own_values.into_iter().map(f32::to_bits).collect();
            comm.all_reduce_max_bits(label, bits)?.wait()?.into_iter().map(f32::from_bits).collect()
        }
    };
    let (mut all, mut lens) = (&all[..], &lens[..]);
    let mut parts = vec![];
    for (run, len) in runs.into_iter().zip(lens_of_runs) {
        let of_run = all.split_off(..len).expect("as many as there were");
        let t = B::float_from_data(of_run.into(), &B::float_device(&run[0]));
        parts.extend(split::<B>(t, lens.split_off(..run.len()).expect("as many as there were")));
    }
    Ok(parts)
}

/// Tensors `[n]` one after another in one.
fn join<B: Float8Backend>(mut tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if tensors.len() == 1 { tensors.remove(0) } else { B::float_cat(tensors, 0) }
}

/// The inverse of [`join`], of tensors of these lengths.
fn split<B: Float8Backend>(all: FloatTensor<B>, lens: &[usize]) -> Vec<FloatTensor<B>> {
    if lens.len() == 1 {
        return vec![all];
    }
    let begins = lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end - len)
    });
    begins.zip(lens).map(|(begin, len)| B::float_slice(all.clone(), &[Slice::from(begin..begin + len)])).collect()
}

/// A tensor of so many elements as `[n]`.
pub(crate) fn flat<B: Float8Backend>(t: FloatTensor<B>) -> FloatTensor<B> {
    let elements = t.shape().num_elements();
    B::float_reshape(t, Shape::from(vec![elements]))
}
