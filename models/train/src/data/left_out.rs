//! [`LeftOut`]: number of files that a source skipped, by reason.

use std::collections::BTreeMap;
use std::fmt;

/// Why a file in a folder is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Its name, or the name of its folder, begins with a dot.
    Hidden,
    /// Text other than `.txt` next to files in a data format: a description, a licence.
    TextBesideData,
    /// JSON that does not begin with an object, or whose first object has none of the fields that
    /// are read.
    OtherJson,
    /// A table (`.csv`, `.tsv`).
    Table,
    /// Compressed (gzip, zstd, xz, zip).
    Packed,
    /// A broken link, or a link to a folder or file that is read already.
    Link,
    /// A pipe, a socket or a device.
    NotAFile,
    /// Without text.
    Empty,
    /// Binary, or not UTF-8.
    Binary,
    /// Cut to nothing by `max_bytes`.
    Beyond,
}

/// Number of skipped files, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut(BTreeMap<Reason, usize>);

impl LeftOut {
    pub(super) fn add(&mut self, reason: Reason) {
        *self.0.entry(reason).or_default() += 1;
    }

    pub(super) fn extend(&mut self, other: &Self) {
        other.0.iter().for_each(|(reason, count)| *self.0.entry(*reason).or_default() += count);
    }

    /// Total number of files.
    pub fn count(&self) -> usize {
        self.0.values().sum()
    }

    /// Number of files skipped for this reason.
    pub fn count_of(&self, reason: Reason) -> usize {
        self.0.get(&reason).copied().unwrap_or_default()
    }

    /// Whether another `field` or `format` could read some of the files.
    pub(super) fn has_other_formats(&self) -> bool {
        [Reason::OtherJson, Reason::Table].iter().any(|reason| self.count_of(*reason) > 0)
    }

    /// Whether no file was skipped.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for LeftOut {
    /// For example `2 hidden, 1 csv`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (reason, count)) in self.0.iter().enumerate() {
            let name = match reason {
                Reason::Hidden => "hidden",
                Reason::TextBesideData => "text beside data",
                Reason::OtherJson => "json without the fields that are read",
                Reason::Table => "csv",
                Reason::Packed => "compressed",
                Reason::Link => "links to nothing or to what is read already",
                Reason::NotAFile => "pipes or devices",
                Reason::Empty => "empty",
                Reason::Binary => "binary or not UTF-8",
                Reason::Beyond => "beyond max_bytes",
            };
            write!(f, "{}{count} {name}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
