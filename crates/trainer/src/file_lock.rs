//! [`FileLock`]: a lock file held by one process at a time, until released or the process ends.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::files;

/// A held lock file, created if missing.
///
/// Closing the file is not enough to release the lock. A process that another thread is just
/// starting has a copy of the descriptor, and with it the lock, until its program begins.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Waits for the lock.
    pub(crate) fn wait(path: &Path) -> io::Result<Self> {
        let file = files::append(path)?;
        file.lock()?;
        Ok(Self(file))
    }

    /// Takes the lock; `None` if it is held elsewhere.
    pub(crate) fn try_take(path: &Path) -> io::Result<Option<Self>> {
        let file = files::append(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // On failure, closing the file releases the lock a little later.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process being started has such a copy: another descriptor of the same open file.
    #[test]
    fn a_copy_of_the_descriptor_does_not_hold_it() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("LOCK");
        let lock = FileLock::wait(&path).unwrap();
        assert!(FileLock::try_take(&path).unwrap().is_none());
        let copy = lock.0.try_clone().unwrap();
        drop(lock);
        assert!(FileLock::try_take(&path).unwrap().is_some());
        drop(copy);
    }
}
