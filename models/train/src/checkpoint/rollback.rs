//! Records a resume from an earlier checkpoint. Until the run has a new checkpoint, later ones are
//! ignored.

use std::path::Path;

use crate::files;

/// File with the step that the run resumed from.
pub(super) const NOTE: &str = "RESUMED_FROM";

/// Step that the run in `folder` resumed from, if it has no new checkpoint since.
pub(super) fn resumed_from(folder: &Path) -> Option<u64> {
    files::read_to_string(&folder.join(NOTE)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::{CheckpointError, CheckpointFolder, Which, Worth, best, find_checkpoint, saved_steps};
    use super::*;

    #[test]
    fn a_run_that_went_back_is_not_resumed_from_what_it_gave_up() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        let folder = CheckpointFolder::open(path).unwrap();
        let save = |step| {
            let worth = Worth::HeldOutLoss(Some(if step == 12 { 0.5 } else { 1.0 }));
            folder.save(step, worth, 9, |_| Ok::<_, CheckpointError>(())).unwrap();
        };
        let best = || best(path).unwrap().unwrap();
        let newest = || find_checkpoint(path, Which::Latest).unwrap().file_name().unwrap().to_owned();
        [4, 8, 12, 16].into_iter().for_each(save);
        folder.resume_from(16).unwrap();
        assert_eq!((newest(), resumed_from(path)), ("step-000000016".into(), None));
        assert_eq!(best(), (12, 0.5));

        folder.resume_from(8).unwrap();
        assert_eq!(newest(), "step-000000008");
        assert_eq!(best(), (4, 1.0), "of equal losses the first, and none that was given up");
        assert_eq!(saved_steps(path).unwrap(), [4, 8, 12, 16], "nothing is removed before there is something new");
        assert!(find_checkpoint(path, Which::Step(16)).is_ok(), "who changes his mind says so");
        // A run that crashes before its first new checkpoint resumes from the same step. After that
        // it resumes from the new one.
        folder.resume_from(8).unwrap();
        save(14);
        assert_eq!((saved_steps(path).unwrap(), resumed_from(path)), (vec![4, 8, 14], None));
        assert_eq!(newest(), "step-000000014");
    }
}
