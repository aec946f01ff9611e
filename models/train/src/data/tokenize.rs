//! Documents of a source to token streams in the cache: in parallel, in the order of the files, a bounded part of them in memory.

use std::path::Path;

use rayon::prelude::*;

use super::DataError;
use super::documents;
use super::encode::{Encoder, Work};
use super::scan::Scanned;
use super::split::{Split, Streams};
use super::token_file::Width;
use crate::chat::with_stack;
use crate::progress::Progress;

/// Bytes of text that are tokenized at once, and documents: a document has some memory of its own.
const BATCH_BYTES: u64 = 8 << 20;
const BATCH_DOCUMENTS: usize = 8192;

/// Writes the streams of `files`, as they were when they were scanned, to `folder`.
pub(super) fn tokenize(
    files: &[&Scanned],
    encoder: &Encoder<'_>,
    held_out_fraction: f64,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Streams, DataError> {
    let streams = write_streams(files, encoder, held_out_fraction, folder, progress);
    // Such a change may be why there is an error.
    files.iter().try_for_each(|file| file.check_unchanged())?;
    streams
}

fn write_streams(
    files: &[&Scanned],
    encoder: &Encoder<'_>,
    held_out_fraction: f64,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Streams, DataError> {
    let width = Width::for_vocabulary(encoder.tokenizer.vocab_size());
    let mut split = Split::create(folder, held_out_fraction, width)?;
    let mut done = Progress { bytes: 0, total_bytes: files.iter().map(|file| file.taken).sum() };
    let mut batch: Vec<Work<'_>> = vec![];
    let mut batch_bytes = 0;
    let mut flush = |batch: &mut Vec<Work<'_>>| -> Result<(), DataError> {
        let tokenized: Vec<_> = with_stack(|| batch.par_iter().map(|work| encoder.encode(work)).collect());
        for (work, part) in batch.drain(..).zip(tokenized) {
            split.push(&part?)?;
            done.bytes += work.bytes;
        }
        progress(done);
        Ok(())
    };
    for file in files {
        for work in documents::read(file, encoder)? {
            let work = match work {
                Ok(work) => work,
                // An earlier line may be wrong too, and is the one to name.
                Err(error) => {
                    flush(&mut batch)?;
                    return Err(error);
                }
            };
            batch_bytes += work.bytes;
            batch.push(work);
            if batch_bytes >= BATCH_BYTES || batch.len() == BATCH_DOCUMENTS {
                flush(&mut batch)?;
                batch_bytes = 0;
            }
        }
    }
    flush(&mut batch)?;
    split.finish()
}
