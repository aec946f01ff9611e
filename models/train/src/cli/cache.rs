//! `cache`: lists and prunes the token cache.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::JobError;
use crate::config::DataSection;
use crate::data::KeptTokens;
use crate::metrics::counted;

const DAY: u64 = 24 * 60 * 60;

/// Folder of the cache, and what to remove.
#[derive(Clone, Debug, Parser)]
pub struct CacheArgs {
    /// Folder set by `data.cache`, if not the default; or a folder with leftovers of a killed
    /// `export` or `tokenize`.
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Remove entries not used for this many days; 0 removes all.
    #[arg(long, value_name = "DAYS")]
    pub prune: Option<u32>,
}

impl CacheArgs {
    /// Prints a line for each folder of the cache, or for each removed one.
    ///
    /// # Errors
    /// A folder that cannot be read or removed; [`JobError::Output`].
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
