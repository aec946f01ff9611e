//! Finds the files that a source may take: the files that it names, and data files in its folders.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::cannot_read;
use super::kind::{Kind, kind};
use super::left_out::{LeftOut, Reason};
use super::{DataError, DataSource, Format};

/// File that may be taken. Candidates sort in reading order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) format: Format,
}

/// Candidates of all paths.
pub(super) fn candidates(source: &DataSource, left: &mut LeftOut) -> Result<Vec<Candidate>, DataError> {
    let mut candidates = vec![];
    for path in &source.paths {
        let metadata = fs::metadata(path).map_err(cannot_read(path))?;
        if metadata.is_dir() {
            candidates.extend(of_folder(source, path, left)?);
        } else {
            let format = source.format.map_or_else(|| named_format(path, &source.field), Ok)?;
            candidates.push(Candidate { path: path.clone(), bytes: metadata.len(), format });
        }
    }
    Ok(candidates)
}

/// Format of a file that the user named.
fn named_format(path: &Path, field: &str) -> Result<Format, DataError> {
    // Reading an invalid header reports its error.
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("bin")) {
        return Ok(Format::Bin);
    }
    match kind(path, field)? {
        Kind::Data(format) | Kind::OtherObjects(format) => Ok(format),
        Kind::Table => Err(DataError::Table { path: path.into() }),
        Kind::OtherJson => Err(DataError::OtherJson { path: path.into() }),
        Kind::Packed(by) => Err(DataError::Packed { path: path.into(), by }),
        Kind::Binary | Kind::Text => Ok(Format::Text),
    }
}

/// Data files and `.txt` files of a folder, or all text if there are no data files. Other text next
/// to data describes it, and JSON is text only if `format` says so.
fn of_folder(source: &DataSource, folder: &Path, left: &mut LeftOut) -> Result<Vec<Candidate>, DataError> {
    let mut search = Search { source, left, found: vec![], links: vec![], folders: HashSet::new() };
    search.folder(folder)?;
    let found = search.with_links();
    if let Some(format) = source.format {
        return Ok(found.into_iter().map(|(path, bytes)| Candidate { path, bytes, format }).collect());
    }
    let (mut data, mut texts) = (vec![], vec![]);
    for (path, bytes) in found {
        match kind(&path, &source.field)? {
            Kind::Data(format) => data.push(Candidate { path, bytes, format }),
            Kind::Table => left.add(Reason::Table),
            Kind::OtherObjects(_) | Kind::OtherJson => left.add(Reason::OtherJson),
            Kind::Packed(_) => left.add(Reason::Packed),
            Kind::Binary => left.add(Reason::Binary),
            Kind::Text => texts.push(Candidate { path, bytes, format: Format::Text }),
        }
    }
    if data.is_empty() {
        return Ok(texts);
    }
    for text in texts {
        let is_named = text.path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt"));
        if is_named { data.push(text) } else { left.add(Reason::TextBesideData) }
    }
    data.sort();
    Ok(data)
}

/// Search of one folder.
struct Search<'a> {
    source: &'a DataSource,
    left: &'a mut LeftOut,
    found: Vec<(PathBuf, u64)>,
    links: Vec<(PathBuf, u64)>,
    /// Canonical paths of the folders searched, so that cyclic links end.
    folders: HashSet<PathBuf>,
}

impl Search<'_> {
    fn folder(&mut self, folder: &Path) -> Result<(), DataError> {
        if !self.folders.insert(fs::canonicalize(folder).map_err(cannot_read(folder))?) {
            self.left.add(Reason::Link);
            return Ok(());
        }
        let entries = fs::read_dir(folder).map_err(cannot_read(folder))?;
        let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(cannot_read(folder))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let is_link = entry.file_type().map_err(cannot_read(&path))?.is_symlink();
            let metadata = match fs::metadata(&path) {
                Err(_) if is_link => {
                    self.left.add(Reason::Link);
                    continue;
                }
                metadata => metadata.map_err(cannot_read(&path))?,
            };
            let wanted = self.source.extension.as_ref();
            if wanted.is_none() && entry.file_name().as_encoded_bytes().starts_with(b".") {
                self.left.add(Reason::Hidden);
            } else if metadata.is_dir() {
                self.folder(&path)?;
            } else if wanted.is_some_and(|wanted| path.extension().is_none_or(|extension| extension != &**wanted)) {
                // Not counted as skipped.
            } else if !metadata.is_file() {
                self.left.add(Reason::NotAFile);
            } else {
                let list = if is_link { &mut self.links } else { &mut self.found };
                list.push((path, metadata.len()));
            }
        }
        Ok(())
    }

    /// All files, sorted and without duplicates.
    fn with_links(self) -> Vec<(PathBuf, u64)> {
        let Self { left, mut found, links, .. } = self;
        if !links.is_empty() {
            let mut seen: HashSet<_> = found.iter().filter_map(|(path, _)| fs::canonicalize(path).ok()).collect();
            for link in links {
                let is_other = fs::canonicalize(&link.0).is_ok_and(|path| seen.insert(path));
                if is_other { found.push(link) } else { left.add(Reason::Link) }
            }
        }
        found.sort();
        found
    }
}
