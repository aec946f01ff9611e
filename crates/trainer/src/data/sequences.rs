//! [`TrainSequences`]: endless training sequences from any position, in an order that depends only
//! on seed and epoch.

use std::sync::Arc;

use anyhow::Result;

use super::order::Permutation;
use super::packing::{Sequence, Sequences};
use super::position::{DataPlace, Position, SourceState, StreamPosition, changed};

/// Sources that are visited together: each of their sequences once per epoch.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) weight: Option<f64>,
    pub(super) sources: Vec<SourceState>,
    /// Sequences of each part, with the index of the source.
    pub(super) parts: Vec<(usize, Sequences)>,
}

impl Stream {
    pub(super) fn count(&self) -> u64 {
        self.parts.iter().map(|(_, part)| part.size.sequences).sum()
    }

    /// Whether it has sequences, but none with a target.
    pub(super) fn has_no_targets(&self) -> bool {
        self.count() == 0 && self.parts.iter().any(|(_, part)| part.size.without_targets > 0)
    }

    /// Source index and part of sequence `i`, and its index in the part.
    fn find(&self, mut i: u64) -> (usize, &Sequences, u64) {
        let mut parts = self.parts.iter().filter(|(_, part)| part.size.sequences > 0).peekable();
        loop {
            match parts.next() {
                Some((_, part)) if i >= part.size.sequences && parts.peek().is_some() => i -= part.size.sequences,
                Some((source, part)) => return (*source, part, i),
                None => unreachable!("a stream without sequences is an error when it is made"),
            }
        }
    }

    pub(super) fn sequence(&self, i: u64) -> Result<Sequence> {
        let (_, part, i) = self.find(i);
        part.sequence(i)
    }

    fn place(&self, i: u64) -> DataPlace {
        let (source, part, i) = self.find(i);
        let (document, offset) = part.part.document_at(part.range(i).start);
        DataPlace { source, document, offset }
    }
}

/// Size of one epoch of each source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochSize {
    /// Sequences that have a target.
    pub sequences: u64,
    /// Skipped sequences: parts of long conversations in which the assistant says nothing.
    pub without_targets: u64,
    /// Tokens of these sequences, without padding.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Tokens that the loss counts.
    pub targets: u64,
    /// Documents that are longer than a sequence and were to stay whole.
    pub cut: u64,
}

/// Endless iterator of training sequences.
///
/// An epoch of a stream has each of its sequences once. With weights, every source is a separate
/// stream, and each sequence comes from the stream that is furthest behind its share.
#[derive(Clone, Debug)]
pub struct TrainSequences {
    pub(super) streams: Arc<[Stream]>,
    /// Sequences taken of each stream.
    taken: Vec<u64>,
    seed: u64,
    seq_len: usize,
}

impl TrainSequences {
    pub(super) fn new(streams: Vec<Stream>, seed: u64, seq_len: usize) -> Self {
        Self { taken: vec![0; streams.len()], streams: streams.into(), seed, seq_len }
    }

    /// Number of sequences in an epoch of each stream. There is one stream for each source with a
    /// weight, or one for all sources.
    pub fn sequences_per_epoch(&self) -> Vec<u64> {
        self.streams.iter().map(Stream::count).collect()
    }

    /// Targets per sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Sequences taken in total.
    pub fn taken(&self) -> u64 {
        self.taken.iter().sum()
    }

    /// Position of the next sequence.
    pub fn position(&self) -> Position {
        let streams = self.streams.iter().zip(&self.taken).map(|(stream, taken)| {
            let (epoch, index) = (taken / stream.count(), taken % stream.count());
            let next = stream.place(self.order(stream, *taken));
            StreamPosition { epoch, index, next, weight: stream.weight, sources: stream.sources.clone() }
        });
        Position { sequences: self.taken(), seed: self.seed, seq_len: self.seq_len, streams: streams.collect() }
    }

    /// Resumes at `position`, with exactly the sequences that would have followed.
    ///
    /// # Errors
    /// A change of anything that decides the sequences, by name.
    pub fn seek(&mut self, position: &Position) -> Result<()> {
        if position.seed != self.seed {
            return changed(&format!("its seed was {}, now it is {}", position.seed, self.seed));
        }
        if position.seq_len != self.seq_len {
            return changed(&format!("seq_len was {}, now it is {}", position.seq_len, self.seq_len));
        }
        let then = weights(position.streams.iter().map(|stream| stream.weight));
        let now = weights(self.streams.iter().map(|stream| stream.weight));
        if then != now {
            return changed(&format!("the weights of its sources were {then}, now they are {now}"));
        }
        let mut taken = vec![];
        for (then, now) in position.streams.iter().zip(&*self.streams) {
            let (index, [before, after]) = (then.index, [&then.sources, &now.sources].map(Vec::len));
            if before != after {
                return changed(&format!("there were {before} sources, now there are {after}"));
            }
            then.sources.iter().zip(&now.sources).try_for_each(|(then, now)| then.check(now))?;
            let count = now.count();
            if index >= count {
                return changed(&format!("the position is sequence {index} of an epoch of {count}"));
            }
            taken.push(then.epoch.saturating_mul(count).saturating_add(index));
        }
        self.taken = taken;
        Ok(())
    }

    /// Size of one epoch. Reads no data: the counts were made with the sequences.
    pub fn epoch_size(&self) -> EpochSize {
        let mut size = EpochSize::default();
        for (_, Sequences { part, size: made, .. }) in self.streams.iter().flat_map(|stream| &stream.parts) {
            size.sequences += made.sequences;
            size.without_targets += made.without_targets;
            size.tokens += made.tokens;
            size.documents += part.num_documents();
            size.targets += part.targets;
            size.cut += made.cut;
        }
        size
    }

    /// Index of the sequence after `taken` others.
    fn order(&self, stream: &Stream, taken: u64) -> u64 {
        Permutation::new(stream.count(), self.seed, taken / stream.count()).at(taken % stream.count())
    }

    /// Stream of the next sequence: the one that is furthest behind its share, or the first of
    /// several.
    fn next_stream(&self) -> usize {
        let weight = |stream: usize| self.streams[stream].weight.unwrap_or(1.0);
        let all: f64 = (0..self.streams.len()).map(weight).sum();
        let after = self.taken() as f64 + 1.0;
        let behind = |stream: usize| after * (weight(stream) / all) - self.taken[stream] as f64;
        (1..self.streams.len()).fold(0, |best, stream| if behind(stream) > behind(best) { stream } else { best })
    }
}

impl Iterator for TrainSequences {
    type Item = Result<Sequence>;

    /// Never returns `None`. After an error, the next call retries the same sequence.
    fn next(&mut self) -> Option<Self::Item> {
        let number = self.next_stream();
        let stream = &self.streams[number];
        let sequence = stream.sequence(self.order(stream, self.taken[number]));
        self.taken[number] += u64::from(sequence.is_ok());
        Some(sequence)
    }
}

fn weights(weights: impl Iterator<Item = Option<f64>>) -> String {
    let names = weights.map(|weight| weight.map_or("none".into(), |weight| weight.to_string()));
    names.collect::<Vec<_>>().join(", ")
}
