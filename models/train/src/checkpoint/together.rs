//! [`Together`]: a checkpoint written by several ranks. The first rank completes it when all files
//! are written.
//!
//! Files are written while training continues, but ranks communicate only between two steps.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use float8_shard::{CommError, Communicator};
use serde::{Deserialize, Serialize};

use super::folder::{Checksum, checksum, discard, under_way};
use super::sharded_tensors::{Index, Rows};
use super::state::Snapshot;
use super::{CheckpointError, CheckpointFolder, Worth, Written};

/// Rows and files written by a rank.
#[derive(Serialize, Deserialize)]
struct Piece {
    rows: Vec<Rows>,
    files: BTreeMap<String, Checksum>,
}

/// Settings of a rank.
#[derive(Debug)]
pub(super) struct OfRank {
    /// Only on the first rank.
    pub(super) folder: Option<Arc<CheckpointFolder>>,
    pub(super) path: PathBuf,
    pub(super) keep: usize,
    pub(super) comm: Communicator,
}

/// A checkpoint being written.
#[derive(Debug)]
pub(super) struct Together {
    of: OfRank,
    step: usize,
    worth: Worth,
    start: Instant,
    /// Taken by `finish`.
    writing: Option<JoinHandle<Result<Piece, CheckpointError>>>,
    is_whole: bool,
}

impl OfRank {
    /// Creates the folder of a checkpoint and starts writing this rank's files. All ranks call it.
    pub(super) fn start(self, snapshot: Snapshot, worth: Worth, config: String) -> Result<Together, CheckpointError> {
        let (start, step) = (Instant::now(), snapshot.step());
        let made = self.folder.as_ref().map_or(Ok(()), |folder| folder.begin(step as u64, worth).map(drop));
        self.comm.all_ok("making a checkpoint's folder", made)?;
        let partial = under_way(&self.path, step as u64, worth);
        let writing = std::thread::spawn(move || {
            let rows = snapshot.write(&partial, worth, &config)?;
            let files = snapshot.files().into_iter().map(|name| Ok((name.clone(), checksum(&partial.join(name))?)));
            Ok(Piece { rows, files: files.collect::<Result<_, CheckpointError>>()? })
        });
        Ok(Together { of: self, step, worth, start, writing: Some(writing), is_whole: false })
    }
}

impl Together {
    /// Whether all ranks have written their files; does not wait for them. All ranks call it.
    pub(super) fn is_finished(&self) -> Result<bool, CommError> {
        let is_finished = self.writing.as_ref().is_none_or(JoinHandle::is_finished);
        let late =
            self.of.comm.all_reduce_max_bits("whether a checkpoint is written", vec![u32::from(!is_finished)])?;
        Ok(late.wait()?[0] == 0)
    }

    /// Waits for all ranks' files; then the first rank completes the checkpoint. If a rank failed,
    /// all return an error. All ranks call it.
    pub(super) fn finish(mut self) -> Result<Written, CheckpointError> {
        let own = self.writing.take().expect("only this takes it").join();
        let own = own.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let comm = &self.of.comm;
        let own = own.map(|piece| serde_json::to_vec(&piece).unwrap_or_default());
        let own = comm.all_ok("writing a checkpoint", own)?;
        let pieces = comm.all_gather_bytes("a checkpoint's files", &own)?;
        comm.all_ok("completing a checkpoint", self.commit(&pieces))?;
        self.is_whole = true;
        Ok(Written { step: self.step, worth: self.worth, took: self.start.elapsed() })
    }

    /// Completes the checkpoint on the first rank.
    fn commit(&self, pieces: &[Vec<u8>]) -> Result<(), CheckpointError> {
        let Some(folder) = &self.of.folder else { return Ok(()) };
        let partial = under_way(&self.of.path, self.step as u64, self.worth);
        let (mut files, mut rows) = (BTreeMap::new(), vec![]);
        for piece in pieces {
            let piece: Piece = serde_json::from_slice(piece)
                .map_err(|source| CheckpointError::Json { path: partial.clone(), source })?;
            files.extend(piece.files);
            rows.extend(piece.rows);
        }
        let index = Index::new(pieces.len(), rows).write(&partial)?;
        let name = index.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, checksum(&index)?);
        folder.commit(self.step as u64, self.worth, self.of.keep, files)
    }
}

impl Drop for Together {
    /// Removes an incomplete checkpoint after an error.
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            let _ = writing.join();
        }
        if self.of.folder.is_some() && !self.is_whole {
            discard(&under_way(&self.of.path, self.step as u64, self.worth));
        }
    }
}
