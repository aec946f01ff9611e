//! Tests of the documentation: commands run, configurations parse, links work.

mod commands;
mod markdown;

use std::collections::BTreeSet;
use std::fs;
#[cfg(unix)]
use std::path::Path;

use models::RunConfig;

use commands::commands;
use markdown::{Chapter, chapters, root};

/// Files and folders with commands and configurations for users.
const FOR_USERS: [&str; 2] = ["README.md", "docs"];

/// Files and folders whose links are checked.
const LINKED: [&str; 7] =
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benches", "docs", "kernels", "crates/burn-float8/README.md"];

/// Files and folders whose tables must be readable in a terminal, and their maximum number of
/// lines.
const READABLE: [(&str, usize); 2] = [("README.md", 110), ("docs", 240)];

/// Maximum number of words in `docs`, without generated pages.
const MOST_WORDS: usize = 15_000;

/// Files that list each chapter of `docs`.
const CONTENTS: [&str; 2] = ["README.md", "docs/README.md"];

/// Maximum number of characters in a cell.
const LONGEST_CELL: usize = 120;

/// Sections of a `Cargo.toml`, which is not the configuration of a run.
const CARGO_SECTIONS: [&str; 3] = ["[dependencies]", "[dev-dependencies]", "[features]"];

#[cfg(unix)]
const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}\
                             {% if add_generation_prompt %}assistant: {% endif %}";

/// Picture on the first page, drawn by one of the commands.
#[cfg(unix)]
const PICTURE: &str = "docs/losses.svg";

/// Creates the files named by the commands, with a small model instead of the large one.
#[cfg(unix)]
fn prepare(folder: &Path) {
    use crate::support::{command, copy, small, stdout, train, vectors};

    fs::create_dir(folder.join("text")).unwrap();
    fs::write(folder.join("text/a.txt"), "One line after another, and then one more.\n".repeat(2000)).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "What is FP8?"}, {"role": "assistant", "content": "Eight bits."}]}"#;
    fs::write(folder.join("chats.jsonl"), format!("{chat}\n").repeat(800)).unwrap();
    fs::write(folder.join("strings.jsonl"), "\"some text\"\n").unwrap();
    fs::write(folder.join("ids.jsonl"), "[72, 105]\n").unwrap();
    ["docs/curves", "configs"].iter().for_each(|name| copy(&root().join(name), &folder.join(name)));
    // Folder for files that the commands do not name.
    let aside = tempfile::tempdir().unwrap();
    let tokenizer = aside.path().join("tokenizer");
    fs::create_dir(&tokenizer).unwrap();
    fs::copy(vectors().join("tokenizer.json"), tokenizer.join("tokenizer.json")).unwrap();
    fs::write(tokenizer.join("chat_template.jinja"), CHAT_TEMPLATE).unwrap();
    fs::write(tokenizer.join("tokenizer_config.json"), r#"{"bos_token": "<|begin_of_text|>"}"#).unwrap();
    let settings = [&*format!("data.tokenizer={}", tokenizer.display()), "training.steps=1"];
    let run = aside.path().join("run");
    let mut made = train(&small(folder.join("text").to_str().unwrap(), &settings));
    stdout(&made.args(["--output-dir", run.to_str().unwrap()]).output().unwrap());
    let exported = folder.join("Llama-3.2-1B");
    stdout(&command(&["export", run.to_str().unwrap(), "--output", exported.to_str().unwrap()]).output().unwrap());
    assert!(exported.join("chat_template.jinja").exists());
}

/// Runs a command in a shell, with `float8` as the program.
#[cfg(unix)]
fn shell(line: &str, folder: &Path) -> std::process::Output {
    use std::process::Command;

    let program = Path::new(env!("CARGO_BIN_EXE_float8")).parent().unwrap().to_path_buf();
    let others = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([program].into_iter().chain(std::env::split_paths(&others))).unwrap();
    let mut command = Command::new("sh");
    // Folder of the token cache.
    command.env("PATH", path).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.args(["-c", line]).current_dir(folder).output().unwrap()
}

/// Each chapter runs in a separate folder, so it must create its files.
#[cfg(unix)]
#[test]
fn the_commands_of_the_documentation_run() {
    let prepared = tempfile::tempdir().unwrap();
    prepare(prepared.path());
    let (mut ran, mut failed, mut drawn) = (0, vec![], None);
    for chapter in chapters(&FOR_USERS) {
        let (lines, _) = commands(&chapter);
        if lines.is_empty() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        crate::support::copy(prepared.path(), folder.path());
        for (number, line) in lines {
            let output = shell(&line, folder.path());
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                failed.push(format!("{}:{number}: {line}\n{said}", chapter.name));
            }
            ran += 1;
        }
        drawn = drawn.or(fs::read(folder.path().join(PICTURE)).ok());
    }
    assert!(failed.is_empty(), "{} of {ran} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(ran >= 10, "{ran} commands");
    let is_current = drawn.expect("a command draws it") == fs::read(root().join(PICTURE)).unwrap();
    assert!(is_current, "{PICTURE} is not what its command draws: run it again");
}

#[test]
fn blocks_of_commands_run_or_say_why_not() {
    let wrong: Vec<_> = chapters(&FOR_USERS).iter().flat_map(|chapter| commands(chapter).1).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn its_configurations_are_read() {
    let mut read = 0;
    for chapter in chapters(&FOR_USERS) {
        for block in chapter.blocks_in("toml") {
            let section = block.text.lines().next().unwrap_or_default();
            if section.starts_with('[') && !CARGO_SECTIONS.contains(&section) {
                let origin = format!("{}:{}", chapter.name, block.line);
                let config =
                    RunConfig::from_toml(origin.as_ref(), &block.text).unwrap_or_else(|error| panic!("{error}"));
                config.validate().unwrap_or_else(|error| panic!("{origin}: {error}"));
                read += 1;
            }
        }
    }
    assert!(read >= 1);
}

/// Target of a link in `chapter`: a file, relative to the root of the repository, and a heading.
fn target(chapter: &Chapter, link: &str) -> Option<(String, Option<String>)> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor.to_string())));
    let folder = chapter.name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = if path.is_empty() { chapter.name.clone() } else { format!("{folder}/{path}") };
    let mut parts: Vec<&str> = vec![];
    for part in path.split('/').filter(|part| !["", "."].contains(part)) {
        if part == ".." { parts.truncate(parts.len().saturating_sub(1)) } else { parts.push(part) }
    }
    Some((parts.join("/"), anchor))
}

#[test]
fn links_lead_to_files_and_headings() {
    let all = chapters(&LINKED);
    let (mut broken, mut checked) = (vec![], 0);
    for chapter in &all {
        for (number, link) in chapter.links() {
            let Some((path, anchor)) = target(chapter, &link) else { continue };
            checked += 1;
            let anchors =
                || Chapter { text: fs::read_to_string(root().join(&path)).unwrap(), name: path.clone() }.anchors();
            let leads = match &anchor {
                _ if !root().join(&path).exists() => false,
                Some(anchor) if path.ends_with(".md") => anchors().contains(anchor),
                _ => true,
            };
            if !leads {
                broken.push(format!("{}:{number}: {link}", chapter.name));
            }
        }
    }
    assert!(broken.is_empty(), "these lead nowhere:\n{}", broken.join("\n"));
    assert!(checked >= 20, "{checked} links");
}

#[test]
fn every_chapter_is_in_the_contents() {
    let contents = chapters(&CONTENTS);
    let links = contents.iter().flat_map(|page| page.links().into_iter().filter_map(|(_, link)| target(page, &link)));
    let listed: BTreeSet<_> = links.map(|(path, _)| path).chain(CONTENTS.map(String::from)).collect();
    let missing: Vec<_> =
        chapters(&["docs"]).into_iter().map(|page| page.name).filter(|name| !listed.contains(name)).collect();
    assert!(missing.is_empty(), "neither {} has {missing:?}", CONTENTS.join(" nor "));
}

#[test]
fn chapters_are_short_and_so_are_cells() {
    let mut long = vec![];
    for (of, most) in READABLE {
        for chapter in chapters(&[of]) {
            let lines = chapter.text.lines().count();
            if lines > most && !chapter.is_generated() {
                long.push(format!("{}: {lines} lines, at most {most}", chapter.name));
            }
            let cells = chapter.cells().into_iter().filter(|(_, cell)| cell.chars().count() > LONGEST_CELL);
            long.extend(cells.map(|(number, cell)| format!("{}:{number}: {cell}", chapter.name)));
        }
    }
    assert!(long.is_empty(), "more than {LONGEST_CELL} characters in a cell, or too many lines:\n{}", long.join("\n"));
    let pages = chapters(&["docs"]).into_iter().filter(|chapter| !chapter.is_generated());
    let words: usize = pages.map(|chapter| chapter.text.split_whitespace().count()).sum();
    assert!(words <= MOST_WORDS, "{words} words in docs, at most {MOST_WORDS}");
}
