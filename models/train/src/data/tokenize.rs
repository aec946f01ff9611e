//! Documents of a source to token streams in the cache: in parallel, in the order of the files, a bounded part of them in memory.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use rayon::prelude::*;

use super::DataError;
use super::documents;
use super::encode::{Encoder, Tokenized, Work};
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
    // What comes next is read while this is tokenized.
    thread::scope(|scope| {
        let (send, batches) = mpsc::sync_channel(1);
        scope.spawn(move || read(files, encoder, &send));
        for batch in batches {
            let batch: Vec<Work<'_>> = batch?;
            let tokenized = with_stack(|| encode(&batch, encoder));
            for (work, part) in batch.iter().zip(tokenized) {
                split.push(&part?)?;
                done.bytes += work.bytes;
            }
            progress(done);
        }
        split.finish()
    })
}

/// Tokenizes a batch up to the first document that cannot be: one that is slow to fail has no followers that are.
fn encode(batch: &[Work<'_>], encoder: &Encoder<'_>) -> Vec<Result<Tokenized, DataError>> {
    let failed = AtomicUsize::new(usize::MAX);
    let encode = |(i, work)| {
        if i > failed.load(Ordering::Relaxed) {
            return None;
        }
        let part = encoder.encode(work);
        if part.is_err() {
            failed.fetch_min(i, Ordering::Relaxed);
        }
        Some(part)
    };
    // What is left out comes after an error.
    batch.par_iter().enumerate().filter_map(encode).collect()
}

/// Sends what the files hold in batches, and the first error after what comes before it: an earlier line may be wrong too, and is the one
/// to name.
fn read<'a>(files: &[&'a Scanned], encoder: &Encoder<'a>, send: &SyncSender<Result<Vec<Work<'a>>, DataError>>) {
    let (mut batch, mut bytes) = (vec![], 0);
    let all = files.iter().flat_map(|file| match documents::read(file, encoder) {
        Ok(documents) => documents,
        Err(error) => Box::new(std::iter::once(Err(error))),
    });
    for work in all {
        match work {
            Ok(work) => {
                bytes += work.bytes;
                batch.push(work);
            }
            Err(error) => {
                // Nobody listens any more once there is an error.
                let _ = send.send(Ok(batch)).and_then(|()| send.send(Err(error)));
                return;
            }
        }
        if bytes >= BATCH_BYTES || batch.len() == BATCH_DOCUMENTS {
            bytes = 0;
            if send.send(Ok(std::mem::take(&mut batch))).is_err() {
                return;
            }
        }
    }
    let _ = send.send(Ok(batch));
}
