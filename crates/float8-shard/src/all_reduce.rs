//! Joins many small tensors into one all-reduce, on device memory where supported, else over the
//! host.
use crate::comm::{Communicator, Operation};
use crate::error::ShardError;
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::read_f32;
use burn_std::{Shape, Slice};

use crate::collectives::DeviceCollectives;

/// Reduces f32 tensors `[n]`, whose number and lengths are equal on all ranks, by
/// [`Operation::AllReduceSum`] or [`Operation::AllReduceMaxBits`]. With `collectives` the host does
/// not wait.
pub(crate) fn all_reduce<B: Float8Backend>(
    comm: &Communicator,
    collectives: Option<&dyn DeviceCollectives<B>>,
    label: &str,
    operation: Operation,
    own: Vec<FloatTensor<B>>,
) -> Result<Vec<FloatTensor<B>>, ShardError> {
    if comm.world_size() == 1 {
        return Ok(own);
    }
    let lens: Vec<usize> = own.iter().map(|t| t.shape()[0]).collect();
    if let Some(collectives) = collectives {
        return Ok(split::<B>(collectives.start(operation, label, join::<B>(own))?()?, &lens));
    }
    // A model may be on several devices: each run of tensors on one device is read at once.
    let runs: Vec<_> = own.chunk_by(|a, b| B::float_device(a) == B::float_device(b)).collect();
    let mut values: Vec<Vec<f32>> = runs.iter().map(|run| read_f32::<B>(join::<B>(run.to_vec()))).collect();
    let lens_of_runs: Vec<_> = values.iter().map(Vec::len).collect();
    let own_values = if values.len() == 1 { values.remove(0) } else { values.concat() };
    let all = if operation == Operation::AllReduceSum {
        comm.all_reduce_sum(label, own_values)?.wait()?
    } else {
        let bits = own_values.into_iter().map(f32::to_bits).collect();
        comm.all_reduce_max_bits(label, bits)?.wait()?.into_iter().map(f32::from_bits).collect()
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

/// Concatenates tensors `[n]`.
fn join<B: Float8Backend>(mut tensors: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if tensors.len() == 1 { tensors.remove(0) } else { B::float_cat(tensors, 0) }
}

/// Splits the result of [`join`] into tensors of these lengths.
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

/// Reshapes a tensor to `[n]`.
pub(crate) fn flat<B: Float8Backend>(t: FloatTensor<B>) -> FloatTensor<B> {
    let elements = t.shape().num_elements();
    B::float_reshape(t, Shape::from(vec![elements]))
}
