//! [`Chapter`]: a Markdown file of the repository with its code, prose, tables, links and headings.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A Markdown file.
pub(crate) struct Chapter {
    /// Path from the root of the repository, with `/`.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// Root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Code block.
pub(crate) struct Block {
    /// Number of its first line.
    pub(crate) line: usize,
    pub(crate) language: String,
    /// Text of an HTML comment on the line before the block.
    pub(crate) mark: Option<String>,
    pub(crate) text: String,
}

/// Adds `name` if it is a file, else the Markdown files in it and its subfolders.
fn add_pages(name: &str, names: &mut Vec<String>) {
    let path = root().join(name);
    if path.is_file() {
        names.push(name.to_string());
        return;
    }
    for file in fs::read_dir(&path).unwrap_or_else(|error| panic!("{name}: {error}")) {
        let path = file.unwrap().path();
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "md") {
            add_pages(&format!("{name}/{}", path.file_name().unwrap().to_str().unwrap()), names);
        }
    }
}

/// These files, and the Markdown files of these folders, sorted by name.
pub(crate) fn chapters(of: &[&str]) -> Vec<Chapter> {
    let mut names = vec![];
    of.iter().for_each(|name| add_pages(name, &mut names));
    names.sort_unstable();
    let read = |name: String| Chapter { text: fs::read_to_string(root().join(&name)).unwrap(), name };
    names.into_iter().map(read).collect()
}

impl Chapter {
    /// All code blocks.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let (mut found, mut open, mut before) = (vec![], None::<Block>, "");
        for (number, line) in (1..).zip(self.text.lines()) {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(language), None) => {
                    let mark = before.strip_prefix("<!-- ").and_then(|mark| mark.strip_suffix(" -->"));
                    let language = language.trim().to_string();
                    open =
                        Some(Block { line: number + 1, language, mark: mark.map(String::from), text: String::new() });
                }
                (Some(_), Some(_)) => found.extend(open.take()),
                (None, Some(block)) => block.text.extend([line, "\n"]),
                (None, None) => {}
            }
            before = line;
        }
        assert!(open.is_none(), "{}: a block of code is not closed", self.name);
        found
    }

    /// Code blocks in `language`.
    pub(crate) fn blocks_in(&self, language: &str) -> Vec<Block> {
        self.blocks().into_iter().filter(|block| block.language == language).collect()
    }

    /// Whether a test writes this page.
    pub(crate) fn is_generated(&self) -> bool {
        self.text.starts_with("<!-- Generated ")
    }

    /// Numbered lines outside of code blocks.
    pub(crate) fn prose(&self) -> Vec<(usize, &str)> {
        let mut in_code = false;
        let mut lines = vec![];
        for (number, line) in (1..).zip(self.text.lines()) {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
            } else if !in_code {
                lines.push((number, line));
            }
        }
        lines
    }

    /// Table cells with their line numbers.
    pub(crate) fn cells(&self) -> Vec<(usize, String)> {
        let rows = self.prose().into_iter().filter(|(_, line)| line.starts_with('|'));
        let cells = |(number, line): (usize, &str)| {
            let line = line.replace("\\|", "\u{0}");
            line.split('|').map(|cell| (number, cell.trim().replace('\u{0}', "|"))).collect::<Vec<_>>()
        };
        rows.flat_map(cells).collect()
    }

    /// Targets of `[text](target)` and `[text]: target`, with their line numbers.
    pub(crate) fn links(&self) -> Vec<(usize, String)> {
        let mut links = vec![];
        for (number, line) in self.prose() {
            let line = without_code(line);
            let inline = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            links.extend(inline.map(|(target, _)| (number, target.to_string())));
            if let Some((_, target)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) {
                links.push((number, target.trim().to_string()));
            }
        }
        links
    }

    /// Anchors of the headings on GitHub.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let mut seen = BTreeMap::<String, usize>::new();
        let headings = self.prose().into_iter().filter_map(|(_, line)| {
            let text = line.trim_start_matches('#');
            (1..=6).contains(&(line.len() - text.len())).then(|| text.strip_prefix(' ')).flatten()
        });
        let anchor = |heading: &str| {
            let slug = slug(heading);
            let count = seen.entry(slug.clone()).or_default();
            *count += 1;
            if *count == 1 { slug } else { format!("{slug}-{}", *count - 1) }
        };
        headings.map(anchor).collect()
    }
}

/// Line without the text between backticks, which has no links.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// GitHub's anchor of a heading: its text in lower case, without punctuation, with hyphens for
/// spaces.
fn slug(heading: &str) -> String {
    let mut text = String::new();
    // Only the text of a link counts.
    for (i, part) in heading.split("](").enumerate() {
        text.push_str(if i == 0 { part } else { part.split_once(')').map_or(part, |(_, rest)| rest) });
    }
    let kept = text.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
