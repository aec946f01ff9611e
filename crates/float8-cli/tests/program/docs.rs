//! Tests of the documentation: commands run, configurations parse, links work.

mod commands;
mod markdown;

use std::collections::BTreeSet;
use std::fs;
#[cfg(unix)]
use std::path::Path;

use models::RunConfig;
use trainer::checkpoint::MAY_CHANGE;

use commands::commands;
use markdown::{Chapter, chapters, root};

/// Files and folders with commands and configurations for users.
const FOR_USERS: [&str; 2] = ["README.md", "docs"];

/// Files and folders whose links are checked.
const LINKED: [&str; 7] =
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benches", "docs", "kernels", "crates/burn-float8"];

/// Files that list each chapter of `docs`.
const CONTENTS: [&str; 2] = ["README.md", "docs/README.md"];

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
    use crate::support::{command, small, stdout, train, vectors};

    fs::create_dir(folder.join("text")).unwrap();
    fs::write(folder.join("text/a.txt"), "One line after another, and then one more.\n".repeat(400)).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "What is FP8?"}, {"role": "assistant", "content": "Eight bits."}]}"#;
    fs::write(folder.join("chats.jsonl"), format!("{chat}\n").repeat(200)).unwrap();
    fs::write(folder.join("strings.jsonl"), "\"some text\"\n").unwrap();
    fs::write(folder.join("ids.jsonl"), "[72, 105]\n").unwrap();
    fs::create_dir_all(folder.join("docs/curves")).unwrap();
    copy(&root().join("docs/curves"), &folder.join("docs/curves"));
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

#[cfg(unix)]
fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() {
            fs::create_dir(&to).unwrap();
            copy(&path, &to);
        } else {
            fs::copy(path, to).unwrap();
        }
    }
}

/// `float8`, which trains on small batches.
#[cfg(unix)]
const SMALL: &str = "float8() {
    case $1 in
        train) command float8 \"$@\" --set training.batch_size=2 --set training.seq_len=64 ;;
        *) command float8 \"$@\" ;;
    esac
}";

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
    command.args(["-c", &format!("{SMALL}\n{line}")]).current_dir(folder).output().unwrap()
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
        copy(prepared.path(), folder.path());
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
fn lines_of_shell_run_or_say_why_not() {
    let wrong: Vec<_> = chapters(&FOR_USERS).iter().flat_map(|chapter| commands(chapter).1).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn its_configurations_are_read() {
    let mut read = 0;
    for chapter in chapters(&FOR_USERS) {
        for (number, block) in chapter.blocks("toml") {
            let section = block.lines().next().unwrap_or_default();
            if section.starts_with('[') && !CARGO_SECTIONS.contains(&section) {
                let origin = format!("{}:{number}", chapter.name);
                let config = RunConfig::from_toml(origin.as_ref(), &block).unwrap_or_else(|error| panic!("{error}"));
                config.validate().unwrap_or_else(|error| panic!("{origin}: {error}"));
                read += 1;
            }
        }
    }
    assert!(read >= 1);
}

#[test]
fn keys_that_may_change_are_listed() {
    let text = fs::read_to_string(root().join("docs/runs.md")).unwrap();
    for key in MAY_CHANGE {
        let key = if key.ends_with('.') { format!("{key}*") } else { key.to_string() };
        assert!(text.contains(&format!("`{key}`")), "{key}");
    }
}

/// Target of a link in `chapter`: a file, relative to the root of the repository, and a heading.
fn target(chapter: &Chapter, link: &str) -> Option<(String, Option<String>)> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor.to_string())));
    let mut parts: Vec<_> = chapter.name.split('/').collect();
    if !path.is_empty() {
        parts.pop();
        for part in path.split('/') {
            match part {
                "." | "" => {}
                ".." => {
                    parts.pop();
                }
                part => parts.push(part),
            }
        }
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
    let listed: BTreeSet<_> = chapters(&CONTENTS)
        .iter()
        .flat_map(|contents| {
            contents.links().into_iter().filter_map(|(_, link)| target(contents, &link)).collect::<Vec<_>>()
        })
        .map(|(path, _)| path)
        .collect();
    let missing: Vec<_> = chapters(&["docs"]).into_iter().map(|chapter| chapter.name).collect();
    let missing: Vec<_> =
        missing.into_iter().filter(|name| !CONTENTS.contains(&&**name) && !listed.contains(name)).collect();
    assert!(missing.is_empty(), "neither {} has {missing:?}", CONTENTS.join(" nor "));
}
