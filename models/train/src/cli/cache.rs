//! `cache`: what is kept of tokenized data, and its removal.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::JobError;
use crate::config::DataSection;
use crate::data::KeptTokens;
use crate::metrics::counted;

const DAY: u64 = 24 * 60 * 60;

/// Which cache, and whether to remove something.
#[derive(Clone, Debug, Parser)]
pub struct CacheArgs {
    /// The folder that `data.cache` names, if it is not the default one, or one where a killed `export` or `tokenize` has left something.
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Remove what has not been used for so many days; 0 removes all.
    #[arg(long, value_name = "DAYS")]
    pub prune: Option<u32>,
}

impl CacheArgs {
    /// Writes a line to `out` for each folder of the cache, or for each that is removed.
    ///
    /// # Errors
    /// [`JobError::Data`], [`JobError::Output`].
    pub fn run(&self, out: &mut dyn Write) -> Result<(), JobError> {
        let cache = DataSection { cache: self.folder.clone(), ..DataSection::default() }.cache();
        let (kept, what) = match self.prune {
            None => (KeptTokens::list(&cache)?, "in"),
            Some(days) => (KeptTokens::prune(&cache, Duration::from_secs(u64::from(days) * DAY))?, "removed from"),
        };
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        for KeptTokens { path, of, bytes, used, is_whole } in &kept {
            let days = counted(used.elapsed().unwrap_or_default().as_secs() / DAY, "day");
            let of = if of.is_empty() { String::new() } else { format!("  of {of}") };
            let name = path.file_name().unwrap_or_default().display();
            let what = if *is_whole { "used" } else { "left unfinished" };
            writeln!(out, "{:10.1} MB  {what} {days} ago  {name}{of}", megabytes(*bytes))?;
        }
        let all = kept.iter().map(|kept| kept.bytes).sum();
        Ok(writeln!(
            out,
            "{}, {:.1} MB {what} {}",
            counted(kept.len() as u64, "folder"),
            megabytes(all),
            cache.display()
        )?)
    }
}
