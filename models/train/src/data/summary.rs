//! [`EpochSize`]: size of one epoch of a run's data.

use super::sequences::TrainSequences;

/// Size of one epoch of each source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochSize {
    /// Sequences that have a target.
    pub sequences: u64,
    /// Skipped sequences: parts of long conversations in which the assistant says nothing.
    pub without_targets: u64,
    /// Tokens of these sequences, without padding.
    pub tokens: u64,
    /// Documents; `None` if a token file does not list them.
    pub documents: Option<u64>,
    /// Tokens that the loss counts; `None` if a token file without that list has a mask.
    pub targets: Option<u64>,
    /// Documents that are longer than a sequence and were to stay whole.
    pub cut: u64,
}

impl TrainSequences {
    /// Size of one epoch. Reads no data: the counts were made with the cache.
    pub fn epoch_size(&self) -> EpochSize {
        let mut size = EpochSize { documents: Some(0), targets: Some(0), ..EpochSize::default() };
        for (_, sequences) in self.streams.iter().flat_map(|stream| &stream.parts) {
            let (part, made) = (sequences.part(), sequences.size());
            size.sequences += made.sequences;
            size.without_targets += made.without_targets;
            size.tokens += made.tokens;
            size.documents = size.documents.zip(part.size.documents).map(|(a, b)| a + b);
            size.targets = size.targets.zip(part.size.targets).map(|(a, b)| a + b);
            size.cut += made.cut;
        }
        size
    }
}
