//! [`FileLock`]: a file that one process holds at a time, until it lets go of it or ends.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::files;

/// A file, made if it is missing, whose lock this value holds.
///
/// Closing the file is not enough to let go of it: a process that another thread is just starting has a copy of the descriptor until
/// its own program begins, and with it the lock.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Waits until nobody else holds it.
    pub(crate) fn wait(path: &Path) -> io::Result<Self> {
        let file = files::append(path)?;
        file.lock()?;
        Ok(Self(file))
    }

    /// `None` where somebody else holds it.
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
        // Where it fails, closing the file lets go of it, a little later.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a process that is being started has: another descriptor of the same open file.
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
