//! [`EpochSize`]: what a run sees of its data in one epoch.

use super::DataError;
use super::sequences::TrainSequences;

/// One epoch of each source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochSize {
    /// Sequences.
    pub sequences: u64,
    /// Tokens, padding left out.
    pub tokens: u64,
    /// Documents; unknown where token files are among the sources, which have no list of them.
    pub documents: Option<u64>,
    /// Tokens that the loss counts; unknown where token files have a mask.
    pub targets: Option<u64>,
    /// Documents that were to stay whole but are longer than a sequence; unknown as `documents` are.
    pub cut: Option<u64>,
}

impl TrainSequences {
    /// How much one epoch is. Places of documents and masks are read, tokens are not.
    ///
    /// # Errors
    /// [`DataError::Io`] if the cache cannot be read.
    pub fn epoch_size(&self) -> Result<EpochSize, DataError> {
        let mut size = EpochSize { documents: Some(0), targets: Some(0), cut: Some(0), ..EpochSize::default() };
        let longest = self.seq_len() as u64 + 1;
        for sequences in self.streams.iter().flat_map(|stream| &stream.parts).map(|(_, sequences)| sequences) {
            let part = sequences.part();
            size.sequences += sequences.count();
            size.tokens += part.len();
            let targets = part.num_targets()?;
            size.targets = size.targets.zip(targets).map(|(a, b)| a + b);
            let mut cut = part.num_documents().map(|_| 0);
            if let (Some(cut), true) = (&mut cut, sequences.are_whole()) {
                part.each_document(|document| {
                    *cut += u64::from(document.end - document.start > longest);
                    Ok(())
                })?;
            }
            size.documents = size.documents.zip(part.num_documents()).map(|(a, b)| a + b);
            size.cut = size.cut.zip(cut).map(|(a, b)| a + b);
        }
        Ok(size)
    }
}
