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

/// These files, and the Markdown files of these folders, sorted by name.
pub(crate) fn chapters(of: &[&str]) -> Vec<Chapter> {
    let mut names = vec![];
    for name in of {
        let path = root().join(name);
        if path.is_file() {
            names.push(name.to_string());
            continue;
        }
        let files = fs::read_dir(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.extend(files.filter(|file| file.ends_with(".md")).map(|file| format!("{name}/{file}")));
    }
    names.sort_unstable();
    let read = |name: String| Chapter { text: fs::read_to_string(root().join(&name)).unwrap(), name };
    names.into_iter().map(read).collect()
}

impl Chapter {
    /// Text of each code block in `language`, and the number of its first line.
    pub(crate) fn blocks(&self, language: &str) -> Vec<(usize, String)> {
        let mut found = vec![];
        let mut open: Option<(usize, &str, String)> = None;
        for (number, line) in (1..).zip(self.text.lines()) {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(language), None) => open = Some((number + 1, language.trim(), String::new())),
                (Some(_), Some(_)) => found.extend(open.take()),
                (None, Some((_, _, text))) => text.extend([line, "\n"]),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block of code is not closed", self.name);
        found.into_iter().filter(|(_, of, _)| *of == language).map(|(number, _, text)| (number, text)).collect()
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
