//! Writes the Rust blocks of the documentation as modules for `docs.rs`.
//!
//! A block with `fn main` is a program, and any other block is part of the `main` of the program
//! before it. An HTML comment on the line before a block changes that:
//! `<!-- continues PAGE -->` names the page with the program, `<!-- part of FILE -->` a file that
//! contains the block.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Pages, relative to the root of the repository. Folders are searched.
const PAGES: [&str; 3] = ["README.md", "crates/burn-float8/README.md", "docs"];

struct Block {
    line: usize,
    mark: String,
    text: String,
}

impl Block {
    fn is_program(&self) -> bool {
        self.text.contains("fn main()")
    }
}

/// Program of a page, and the blocks that continue it.
struct Program<'a> {
    line: usize,
    module: String,
    text: &'a str,
    parts: Vec<(String, &'a str)>,
}

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../..");
    let mut pages = vec![];
    PAGES.iter().for_each(|page| add_pages(&root, page, &mut pages));
    pages.sort_unstable();
    let blocks: Vec<_> =
        pages.iter().map(|page| (page, blocks(&fs::read_to_string(root.join(page)).unwrap()))).collect();

    let mut programs = BTreeMap::<&str, Vec<Program<'_>>>::new();
    for (page, blocks) in &blocks {
        let of_page = blocks.iter().filter(|block| block.is_program()).map(|block| Program {
            line: block.line,
            module: module(page, block.line),
            text: &block.text,
            parts: vec![],
        });
        programs.insert(page, of_page.collect());
    }
    for (page, blocks) in &blocks {
        for block in blocks.iter().filter(|block| !block.is_program()) {
            if let Some(file) = block.mark.strip_prefix("part of ") {
                println!("cargo::rerun-if-changed={}", root.join(file).display());
                let whole = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
                assert!(whole.contains(&block.text), "{page}:{}: {file} does not contain this block", block.line);
                continue;
            }
            let other = block.mark.strip_prefix("continues ");
            let of = other.unwrap_or(page);
            let programs = programs.get_mut(of).unwrap_or_else(|| panic!("{page}:{}: no page {of}", block.line));
            let program = match other {
                Some(_) => programs.first_mut(),
                None => programs.iter_mut().rfind(|program| program.line < block.line),
            };
            let program = program.unwrap_or_else(|| panic!("{page}:{}: no program before this block", block.line));
            program.parts.push((module(page, block.line), &*block.text));
        }
    }

    let mut text = String::new();
    for Program { module, text: program, parts, .. } in programs.into_values().flatten() {
        write!(text, "mod {module} {{\n{program}\n#[test]\nfn runs() {{ main().unwrap() }}\n").unwrap();
        for (module, part) in parts {
            write!(
                text,
                "mod {module} {{\nuse super::*;\nfn part() -> Result<(), burn_float8::Float8Error> {{\n{part}\nOk(())\n}}\n\
                 #[test]\nfn runs() {{ part().unwrap() }}\n}}\n"
            )
            .unwrap();
        }
        text += "}\n";
    }
    fs::write(PathBuf::from(env::var("OUT_DIR").unwrap()).join("docs.rs"), text).unwrap();
}

/// Adds `name` if it is a file, else the Markdown files in it and its subfolders.
fn add_pages(root: &Path, name: &str, pages: &mut Vec<String>) {
    let path = root.join(name);
    println!("cargo::rerun-if-changed={}", path.display());
    if path.is_file() {
        pages.push(name.into());
        return;
    }
    for file in fs::read_dir(&path).unwrap() {
        let file = file.unwrap().path();
        if file.is_dir() || file.extension().is_some_and(|extension| extension == "md") {
            add_pages(root, &format!("{name}/{}", file.file_name().unwrap().to_str().unwrap()), pages);
        }
    }
}

/// Rust blocks of a page.
fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut open, mut before) = (vec![], None::<Block>, "");
    for (number, line) in (1..).zip(page.lines()) {
        match &mut open {
            None if line == "```rust" => {
                let mark = before.strip_prefix("<!-- ").and_then(|mark| mark.strip_suffix(" -->")).unwrap_or_default();
                open = Some(Block { line: number + 1, mark: mark.into(), text: String::new() });
            }
            Some(_) if line == "```" => blocks.extend(open.take()),
            Some(block) => block.text.extend([line, "\n"]),
            None => {}
        }
        before = line;
    }
    blocks
}

/// Name of a block's module: its page and its first line.
fn module(page: &str, line: usize) -> String {
    let page = page.trim_end_matches(".md").to_lowercase();
    format!("{}_{line}", page.replace(|c: char| !c.is_ascii_alphanumeric(), "_"))
}
