//! Batches of sequences for next-token prediction: `targets[t] = inputs[t + 1]`.

use anyhow::Result;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::data::{Dataset, EpochSize, Position, Sequence, SequenceShape, TrainSequences, no_targets};

/// Attention mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttnMaskType {
    /// A token attends to all earlier tokens of its sequence, including other documents.
    #[default]
    Causal,
    /// A token attends to earlier tokens of its document. The first token of a document is then not
    /// a target, because nothing predicts it.
    BlockCausal,
}

/// Sequences of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    sequences: Vec<Sequence>,
    mask: AttnMaskType,
}

/// A batch on a device.
#[derive(Clone, Debug)]
pub struct BatchTensors<B: Backend> {
    /// Tokens, `[batch, seq_len]`.
    pub inputs: Tensor<B, 2, Int>,
    /// Next token of each input, `[batch, seq_len]`.
    pub targets: Tensor<B, 2, Int>,
    /// 1 for each target that counts in the loss, else 0, in f32, `[batch, seq_len]`; `None` if all
    /// count.
    pub loss_mask: Option<Tensor<B, 2>>,
    /// Document of each input, numbered within its sequence, `[batch, seq_len]`: attention stays
    /// within it. If `None`, attention covers the whole sequence.
    pub documents: Option<Tensor<B, 2, Int>>,
}

impl Batch {
    /// Batch of sequences of the same length, at least one.
    pub fn new(sequences: Vec<Sequence>, mask: AttnMaskType) -> Self {
        Self { sequences: sequences.into_iter().map(|sequence| masked(sequence, mask)).collect(), mask }
    }

    /// Copies the batch to a device.
    pub fn tensors<B: Backend>(&self, device: &B::Device) -> BatchTensors<B> {
        let (rows, len) = (self.sequences.len(), self.seq_len());
        let [inputs, targets] = [0, 1].map(|shift| {
            let tokens = self.sequences.iter().flat_map(|sequence| &sequence.tokens[shift..shift + len]);
            let values: Vec<i32> = tokens.map(|&token| token as i32).collect();
            Tensor::from_data(TensorData::new(values, [rows, len]), device)
        });
        let is_masked = self.sequences.iter().any(|sequence| sequence.loss_mask.is_some());
        let loss_mask = is_masked.then(|| {
            let counts = |sequence: &Sequence| sequence.loss_mask.clone().unwrap_or_else(|| vec![true; len]);
            let values: Vec<f32> =
                self.sequences.iter().flat_map(counts).map(|counts| f32::from(u8::from(counts))).collect();
            Tensor::from_data(TensorData::new(values, [rows, len]), (device, DType::F32))
        });
        let has_several = self.sequences.iter().any(|sequence| sequence.document_starts.iter().any(|place| *place > 0));
        let documents = (self.mask == AttnMaskType::BlockCausal && has_several).then(|| {
            let values: Vec<i32> = self.sequences.iter().flat_map(|sequence| documents(sequence, len)).collect();
            Tensor::from_data(TensorData::new(values, [rows, len]), device)
        });
        BatchTensors { inputs, targets, loss_mask, documents }
    }

    /// Number of sequences.
    pub fn batch_size(&self) -> usize {
        self.sequences.len()
    }

    /// Number of targets per sequence.
    pub fn seq_len(&self) -> usize {
        self.sequences.first().map_or(0, |sequence| sequence.tokens.len() - 1)
    }

    /// Number of tokens without padding, used for throughput.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.num_tokens.min(self.seq_len())).sum()
    }

    /// Number of targets that count in the loss.
    pub fn num_targets(&self) -> usize {
        self.sequences.iter().map(num_targets).sum()
    }
}

/// Masks the first tokens of documents as targets if attention stays within documents.
fn masked(mut sequence: Sequence, mask: AttnMaskType) -> Sequence {
    if mask == AttnMaskType::BlockCausal {
        let Sequence { tokens, loss_mask, document_starts, .. } = &mut sequence;
        for place in document_starts.iter().filter(|place| **place > 0) {
            loss_mask.get_or_insert_with(|| vec![true; tokens.len() - 1])[place - 1] = false;
        }
    }
    sequence
}

/// Number of targets that count in the loss.
fn num_targets(sequence: &Sequence) -> usize {
    match &sequence.loss_mask {
        Some(mask) => mask.iter().filter(|counts| **counts).count(),
        None => sequence.tokens.len() - 1,
    }
}

/// Document number of each of the first `len` tokens: how many documents have begun after the first
/// token.
fn documents(sequence: &Sequence, len: usize) -> Vec<i32> {
    let mut starts = sequence.document_starts.iter().filter(|place| **place > 0).peekable();
    let mut number = 0;
    let of = |place| {
        if starts.next_if(|start| **start == place).is_some() {
            number += 1;
        }
        number
    };
    (0..len).map(of).collect()
}

/// Endless training batches.
#[derive(Clone, Debug)]
pub struct TrainBatches {
    sequences: TrainSequences,
    batch_size: usize,
    mask: AttnMaskType,
}

impl TrainBatches {
    /// Batches in an order that depends on `seed` only.
    ///
    /// # Errors
    /// The errors of [`Dataset::train`].
    pub fn new(data: &Dataset, shape: SequenceShape, mask: AttnMaskType, seed: u64) -> Result<Self> {
        Ok(Self { sequences: data.train(shape, seed)?, batch_size: shape.batch_size, mask })
    }

    /// Sequences per epoch of each stream, as [`TrainSequences::sequences_per_epoch`].
    pub fn sequences_per_epoch(&self) -> Vec<u64> {
        self.sequences.sequences_per_epoch()
    }

    /// Size of an epoch.
    pub fn epoch_size(&self) -> EpochSize {
        self.sequences.epoch_size()
    }

    /// Completed epochs; `None` if there are several weighted sources, which have separate epochs.
    pub fn epochs(&self) -> Option<u64> {
        let [sequences] = self.sequences_per_epoch()[..] else { return None };
        self.sequences.taken().checked_div(sequences)
    }

    /// Sequences taken from the current epoch.
    pub fn of_epoch(&self) -> u64 {
        let epoch = self.sequences_per_epoch().iter().sum();
        self.sequences.taken().checked_rem(epoch).unwrap_or_default()
    }

    /// Position of the next batch.
    pub fn position(&self) -> Position {
        self.sequences.position()
    }

    /// Continues at `position`.
    ///
    /// # Errors
    /// The errors of [`TrainSequences::seek`].
    pub fn seek(&mut self, position: &Position) -> Result<()> {
        self.sequences.seek(position)
    }

    /// Next batch with a target.
    ///
    /// Batches without targets only occur with attention within documents: the first token of a
    /// document is not a target there.
    ///
    /// # Errors
    /// An epoch without such a batch; any error of reading sequences.
    pub fn next_batch(&mut self) -> Result<Batch> {
        let epoch: u64 = self.sequences.sequences_per_epoch().iter().sum();
        let mut seq_len = 0;
        for _ in 0..=epoch {
            let sequences = self.sequences.by_ref().take(self.batch_size).collect::<Result<_>>()?;
            let batch = Batch::new(sequences, self.mask);
            if batch.num_targets() > 0 {
                return Ok(batch);
            }
            seq_len = batch.seq_len();
        }
        Err(no_targets("training", seq_len))
    }
}

/// Up to `count` batches of the validation sequences, always the same. The last batch may be smaller.
///
/// # Errors
/// No sequence with a target; the errors of [`Dataset::held_out`].
pub fn held_out_batches(data: &Dataset, shape: SequenceShape, mask: AttnMaskType, count: usize) -> Result<Vec<Batch>> {
    let sequences = data.held_out(shape, count.saturating_mul(shape.batch_size))?;
    let masked = sequences.into_iter().map(|sequence| masked(sequence, mask));
    let sequences: Vec<_> = masked.filter(|sequence| num_targets(sequence) > 0).collect();
    if sequences.is_empty() {
        return Err(no_targets("validation", shape.seq_len));
    }
    Ok(sequences.chunks(shape.batch_size).map(|sequences| Batch { sequences: sequences.to_vec(), mask }).collect())
}
