//! `cache`: lists and prunes the token cache.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::config::DataSection;
use crate::data::KeptTokens;
use crate::metrics::counted;

const DAY: u64 = 24 * 60 * 60;

/// Command on the token cache.
#[derive(Clone, Debug, Parser)]
pub enum CacheCommand {
    /// List the folders of the cache.
    List(CacheFolder),
    /// Remove folders that were not used for a time.
    Prune {
        /// The cache.
        #[command(flatten)]
        cache: CacheFolder,
        /// Minimum age: a number of hours, days or weeks, as 12h, 30d or 4w.
        #[arg(long, value_name = "AGE", value_parser = age)]
        older_than: Duration,
    },
}

/// Folder of the token cache.
#[derive(Clone, Debug, Parser)]
pub struct CacheFolder {
    /// Folder set by `data.cache`, if not the default; or a folder with leftovers of a killed
    /// `export` or `tokenize`.
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// Parses an age such as `30d`.
fn age(text: &str) -> Result<Duration, String> {
    let wrong = || "an age is like 12h, 30d or 4w".to_string();
    let unit = match text.chars().last() {
        Some('h') => DAY / 24,
        Some('d') => DAY,
        Some('w') => 7 * DAY,
        _ => return Err(wrong()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    count.checked_mul(unit).map(Duration::from_secs).ok_or_else(wrong)
}

impl CacheCommand {
    /// Prints a line for each folder of the cache, or for each removed one.
    ///
    /// # Errors
    /// A folder that cannot be read or removed, and a log that cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let (Self::List(cache) | Self::Prune { cache, .. }) = self;
        let cache = DataSection { cache: cache.folder.clone(), ..DataSection::default() }.cache();
        let (kept, what) = match self {
            Self::List(_) => (KeptTokens::list(&cache)?, "in"),
            Self::Prune { older_than, .. } => (KeptTokens::prune(&cache, *older_than)?, "removed from"),
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
