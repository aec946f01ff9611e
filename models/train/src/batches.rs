//! Token streams to batches of next-token prediction: `targets[t] = inputs[t + 1]`.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use crate::data::Position;
use crate::rng::Rng;

/// Too little text for the batches asked for.
#[derive(Debug, thiserror::Error)]
#[error(
    "too little text: the {split} split has {have} tokens, one batch of {batch_size} \
     sequences of {seq_len} + 1 tokens needs {need}: give more text or raise data.max_bytes, \
     data.held_out_fraction moves text between the splits"
)]
pub struct BatchError {
    /// `training` or `held-out`.
    pub split: &'static str,
    /// Tokens there are.
    pub have: usize,
    /// Tokens needed.
    pub need: usize,
    /// Sequences in a batch.
    pub batch_size: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
}

/// Sequences of `seq_len + 1` tokens, so that inputs and targets overlap in all but one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    rows: Vec<Vec<u32>>,
}

impl Batch {
    /// Inputs and targets, each `[batch_size, seq_len]`.
    pub fn tensors<B: Backend>(&self, device: &B::Device) -> [Tensor<B, 2, Int>; 2] {
        [0, 1].map(|shift| {
            let len = self.rows[0].len() - 1;
            let tokens = self.rows.iter().flat_map(|row| &row[shift..shift + len]);
            let values: Vec<i32> = tokens.map(|&token| token as i32).collect();
            Tensor::from_data(TensorData::new(values, [self.rows.len(), len]), device)
        })
    }

    /// Targets in the batch.
    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.len() - 1).sum()
    }
}

/// Shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub batch_size: usize,
    /// Targets per sequence.
    pub seq_len: usize,
}

impl BatchShape {
    /// # Errors
    /// [`BatchError`] unless `tokens` hold one batch without overlap.
    fn check(self, split: &'static str, tokens: &[u32]) -> Result<(), BatchError> {
        let Self { batch_size, seq_len } = self;
        let need = batch_size.saturating_mul(seq_len.saturating_add(1));
        let have = tokens.len();
        if have >= need {
            return Ok(());
        }
        Err(BatchError { split, have, need, batch_size, seq_len })
    }
}

/// Endless training batches: windows at random places of the stream.
#[derive(Clone, Debug)]
pub struct TrainBatches<'a> {
    tokens: &'a [u32],
    shape: BatchShape,
    rng: Rng,
    taken: u64,
    seed: u64,
}

impl<'a> TrainBatches<'a> {
    /// Batches of `tokens` in an order that depends on `seed` only.
    ///
    /// # Errors
    /// [`BatchError`].
    pub fn new(tokens: &'a [u32], shape: BatchShape, seed: u64) -> Result<Self, BatchError> {
        shape.check("training", tokens)?;
        Ok(Self { tokens, shape, rng: Rng::named(seed, "batches"), taken: 0, seed })
    }

    /// The next sequence.
    pub fn position(&self) -> Position {
        Position { taken: self.taken }
    }

    /// Goes there.
    pub fn seek(&mut self, position: &Position) {
        self.rng = Rng::named(self.seed, "batches");
        self.taken = 0;
        while self.taken < position.taken {
            self.next();
        }
    }
}

impl Iterator for TrainBatches<'_> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        self.taken += self.shape.batch_size as u64;
        let len = self.shape.seq_len + 1;
        let mut row = || {
            let start = self.rng.below(self.tokens.len() - len + 1);
            self.tokens[start..start + len].to_vec()
        };
        Some(Batch { rows: (0..self.shape.batch_size).map(|_| row()).collect() })
    }
}

/// Up to `count` batches of windows that do not overlap, at even distances over `tokens`: always the same ones.
///
/// # Errors
/// [`BatchError`] if there is not one batch.
pub fn held_out_batches(tokens: &[u32], shape: BatchShape, count: usize) -> Result<Vec<Batch>, BatchError> {
    shape.check("held-out", tokens)?;
    let len = shape.seq_len + 1;
    let available = tokens.len() / len;
    let batches = count.min(available / shape.batch_size);
    let wanted = batches * shape.batch_size;
    let rows: Vec<_> = (0..wanted)
        .map(|row| {
            let start = row * available / wanted * len;
            tokens[start..start + len].to_vec()
        })
        .collect();
    Ok(rows.chunks(shape.batch_size).map(|rows| Batch { rows: rows.to_vec() }).collect())
}
