//! [`EpochSize`]: what a run sees of its data in one epoch.

use super::sequences::TrainSequences;

/// One epoch of each source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochSize {
    /// Sequences that have a target.
    pub sequences: u64,
    /// Sequences that are left out: parts of long conversations in which the assistant says nothing.
    pub without_targets: u64,
    /// Tokens of these sequences, padding left out.
    pub tokens: u64,
    /// Documents; unknown where there are token files that do not list them.
    pub documents: Option<u64>,
    /// Tokens that the loss counts; unknown where such files have a mask.
    pub targets: Option<u64>,
    /// Documents that were to stay whole but are longer than a sequence.
    pub cut: u64,
}

impl TrainSequences {
    /// How much one epoch is. No data is read: it was counted when the cache was made.
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
